"""Small modules with what makes cutting hard: ties, branches, state, changes in place, tuples."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class TwoBranches(nn.Module):
    """Two chains from one stem that meet at the end; the left one also feeds the right one."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.join = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = self.stem(x)
        left = self.left(x)
        right = self.right(x + left)
        return self.join(torch.cat([left, right], dim=-1))


class TiedEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class WeightUsedDirectly(nn.Module):
    """The head is no module: it uses the embedding's weight, transposed between the layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x) * self.scale
        return x @ self.embed.weight.t()


class Normalised(nn.Module):
    """Batch norms, whose running statistics forward updates, and dropout."""

    def __init__(self, dropout):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2), nn.ReLU(inplace=True), nn.Dropout(dropout)
            )
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Memory(nn.Module):
    """LSTMs return tuples; states go from one to the next beside the sequence."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))

    def forward(self, x):
        state = None
        for layer in self.layers:
            x, state = layer(x, state)
        return x + state[0].transpose(0, 1)


class Chunks(nn.Module):
    """Parts of split tensors go different ways."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        a, b, c = self.wide(x).chunk(3, dim=-1)
        a = self.first(a)
        upper, lower = torch.split(b, 3, dim=-1)
        b = self.second(torch.cat([lower, upper], dim=-1) * a)
        return self.last(a + b + c)


class ChangesInPlace(nn.Module):
    """Values are changed after other modules made them, whole and through views, and used again."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        a = self.layers[0](x)
        b = self.layers[1](a)
        view = b[:, 1:]
        b += a
        b[:, 0] = 2.0
        c = self.relu(self.layers[2](2 * b))
        view.mul_(3.0)
        d = self.layers[3](c + b)
        d[..., 1:3].add_(c[..., 1:3])
        d.masked_fill_(d > 1, 0.25)
        return d * view.sum() + b


class ChangesInside(nn.Module):
    """Blocks that change what they made themselves, through views too, and what they were given."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ChangingBlock() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(2 * x) + x
        return x


class ChangingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = self.first(x)
        h[:, 0] = 0.0
        h[:, 1:].mul_(2.0)
        mask = torch.zeros(WIDTH, dtype=x.dtype)
        mask[1:4] = 1.0
        h = h.relu_() * mask
        y = self.second(h)
        y.add_(1.0)
        return y


class Constants(nn.Module):
    """Masks and tables that every block uses, made once, in place too; a frozen buffer; no_grad."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("table", torch.randn(WIDTH, WIDTH), persistent=False)
        self.register_buffer("offset", torch.randn(WIDTH))

    def forward(self, x):
        mask = torch.ones(WIDTH, WIDTH, dtype=x.dtype)
        mask.tril_()
        mask[0] = 0.5
        table = self.table * mask * torch.tensor(2.0, dtype=x.dtype)
        x = self.first(x)
        with torch.no_grad():
            scale = x.abs().mean()
        for block in self.blocks:
            x = torch.tanh(block(x)) @ table / scale + self.offset
        return x


class CalledAgain(nn.Module):
    """One block, three times, with an activation of its own that is shared too."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(WIDTH, WIDTH)
        self.act = nn.Tanh()

    def forward(self, x):
        for _ in range(3):
            x = x + self.act(self.block(x))
        return x


class TwoInputs(nn.Module):
    """Both model inputs are used far apart; an integer tensor and a boolean mask cross the borders."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens, x):
        mask = (tokens > 4).unsqueeze(-1)
        h = self.embed(tokens)
        for block in self.blocks:
            h = torch.where(mask, block(h), h) + x
        return self.head(h * x) + tokens.unsqueeze(-1)


class PartlyFrozen(nn.Module):
    """The first modules take no gradient."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for layer in self.layers[:2]:
            layer.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = functional.relu(layer(x))
        return x


class Counted(nn.Module):
    """A buffer of the model itself follows a mean; a frozen copy of it is used later."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        x = self.layers[0](x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        x = self.layers[1](x - self.mean)
        return self.layers[2](x)


class Followed(nn.Module):
    """A buffer follows a value in two steps of one chain, between modules, and nobody reads it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        x = self.layers[0](x)
        y = self.layers[1](x)
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return self.layers[2](y)


class ChangesOfChanges(nn.Module):
    """What a change in place returned is changed again by other modules: whole, in parts, by a copy."""

    def __init__(self):
        super().__init__()
        self.first = Adding()
        self.second = Adding()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        plain = 2 * x
        a = self.first(x)
        view = a[:, 1:]
        a[:, 0] = 2.0
        b = self.second(self.linears[0](a) + view.sum())
        left, right = plain.split(WIDTH // 2, dim=1)
        left.add_(1.0)
        right[0].mul_(2.0)
        c = self.linears[1](b)
        copy = torch.empty_like(c).copy_(c)
        d = self.linears[2](c)
        copy[:, 2] = 0.5
        d.copy_(d + copy)
        return d * b + plain


class Adding(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x).add_(1.0)


class InsideContexts(nn.Module):
    """Modules called under no_grad, autocast and checkpoint; a table made by a module from constants."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.turn = Turning()

    def forward(self, x):
        with torch.no_grad():
            for layer in self.frozen:
                x = torch.tanh(layer(x))
        cosine = self.turn(torch.arange(WIDTH))
        for layer in self.layers[:2]:
            x = x + checkpoint(layer, x, use_reentrant=False) * cosine
        for layer in self.layers[2:]:
            with torch.autocast("cpu", enabled=False):
                x = x + layer(x)
        return x * cosine


class Turning(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequency", torch.rand(WIDTH), persistent=False)

    @torch.no_grad()
    def forward(self, places):
        return (self.frequency * places).cos()


class Noisy(nn.Module):
    """Random numbers between modules, drawn in place, and in blocks under autocast."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        noise = torch.empty(WIDTH, dtype=x.dtype)
        noise[1:].normal_()
        noise[0] = 0.0
        x = x + noise  # drawn first in the first stage too: one sequence of random numbers serves all cuts
        for layer in self.layers:
            with torch.autocast("cpu", enabled=False):
                x = functional.dropout(layer(x), 0.4, self.training)
            x = x + noise
        return x


class Turned(nn.Module):
    """A transposed and a channels-last tensor cross borders to layers whose views need that layout."""

    def __init__(self):
        super().__init__()
        self.spread = nn.Conv2d(1, WIDTH, 1)
        self.last = ChannelsLast()
        self.rows = Rows((0, 2, 3, 1))
        self.turn = Rows((0, 2, 1), view=False)
        self.back = Rows((0, 2, 1))

    def forward(self, x):
        x = self.rows(self.last(self.spread(x)))
        return self.back(self.turn(x.view(2, -1, WIDTH)))


class ChannelsLast(nn.Module):
    def forward(self, x):
        return torch.tanh(x).contiguous(memory_format=torch.channels_last)


class Rows(nn.Module):
    """Turns the dimensions; with `view` the last one becomes rows without a copy, before the weights."""

    def __init__(self, order, view=True):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.order, self.view = order, view

    def forward(self, x):
        if self.view:
            return self.linear(x.permute(self.order).view(-1, WIDTH))
        return self.linear(x).permute(self.order)


class Normed(nn.Module):
    """Parametrised weights: one of them keeps buffers that forward updates."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [
                weight_norm(nn.Linear(WIDTH, WIDTH)),
                spectral_norm(nn.Linear(WIDTH, WIDTH)),
                nn.Linear(WIDTH, WIDTH),
            ]
        )

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def tokens(batch: int = 4, length: int = 5) -> Tensor:
    return torch.randint(0, 11, (batch, length))


def vectors(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, WIDTH)), dtype=torch.float64)


# name -> (model, inputs); models in float64
ODD_MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "two branches": lambda: (TwoBranches(), (vectors(),)),
    "tied embedding": lambda: (TiedEmbedding(), (tokens(),)),
    "weight used directly": lambda: (WeightUsedDirectly(), (tokens(),)),
    "batch norm": lambda: (Normalised(0.0), (vectors(4, 2, WIDTH),)),
    "batch norm and dropout": lambda: (Normalised(0.3), (vectors(4, 2, WIDTH),)),
    "tuples between modules": lambda: (Memory(), (vectors(4, 5, WIDTH),)),
    "chunks": lambda: (Chunks(), (vectors(),)),
    "changes in place": lambda: (ChangesInPlace(), (vectors(),)),
    "changes inside": lambda: (ChangesInside(), (vectors(),)),
    "constants": lambda: (Constants(), (vectors(),)),
    "called again": lambda: (CalledAgain(), (vectors(),)),
    "two inputs": lambda: (TwoInputs(), (tokens(), vectors(4, 5, WIDTH))),
    "partly frozen": lambda: (PartlyFrozen(), (vectors(),)),
    "inside contexts": lambda: (InsideContexts(), (vectors(),)),
    "noise and dropout": lambda: (Noisy(), (vectors(),)),
    "turned": lambda: (Turned(), (vectors(2, 1, 3, 3),)),
    "parametrised": lambda: (Normed(), (vectors(),)),
    "changes of changes": lambda: (ChangesOfChanges(), (vectors(),)),
    "a mean that nobody reads": lambda: (Followed(), (vectors(),)),
    "a running mean": lambda: (Counted(), (vectors(),)),
}


def make(name: str, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The named model with weights and inputs of `seed`."""
    torch.manual_seed(seed)
    model, inputs = ODD_MODELS[name]()
    return model.double(), inputs
