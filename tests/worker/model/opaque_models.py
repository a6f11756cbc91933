"""Small models with modules that no trace takes: branches on values, derivatives in forward, codebooks, graphs, loops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 8
CLASSES = 3


class Branch(nn.Module):
    """Another layer where the rows' sum is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.positive(x)) if x.sum() > 0 else self.negative(x)


class Equilibrium(nn.Module):
    """Iterates a layer until it moves little, as deep equilibrium models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        z, moved, left = torch.zeros_like(x), torch.tensor(1.0), 30
        while moved > 1e-3 and left:
            after = torch.tanh(0.3 * self.layer(z) + x)
            moved, z, left = (after - z).abs().max(), after, left - 1
        return z


class Derivative(nn.Module):
    """Adds the derivative of its own result by its input, as physics-informed nets do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():  # in eval mode as well
            x.requires_grad_()
            u = self.net(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u + slope


class PerRow(nn.Module):
    """The gradient of a scalar net at every row, by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        def energy(weights: dict[str, Tensor], row: Tensor) -> Tensor:
            return torch.func.functional_call(self.net, weights, (row,)).sum()

        weights = dict(self.net.named_parameters())
        return x + torch.vmap(torch.func.grad(energy, argnums=1), in_dims=(None, 0))(weights, x)


class _Reversed(torch.autograd.Function):
    """The identity, with half of the gradient against its direction."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class Reversal(nn.Module):
    """A backward of its own behind a branch on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return _Reversed.apply(x) if x.mean() > 0 else _Reversed.apply(2 * x)


class Codebook(nn.Module):
    """Nearest codes, which move towards what chose them: buffers written through .data, replaced, and begun once."""

    def __init__(self, codes: int = 6) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(codes, WIDTH))
        self.register_buffer("sizes", torch.zeros(codes))
        self.register_buffer("begun", torch.tensor(False))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        rows = x.detach()
        if self.training and not self.begun:
            self.codes.data.copy_(rows[torch.arange(len(self.codes)) % len(rows)])
            self.begun.fill_(True)
        chosen = functional.one_hot(torch.cdist(rows, self.codes).argmin(-1), len(self.codes)).to(rows.dtype)
        codes = chosen @ self.codes
        if self.training:
            self.sizes.data.lerp_(chosen.sum(0).to(self.sizes.dtype), 0.1)
            means = (chosen.T @ rows) / chosen.sum(0).clamp(min=1)[:, None]
            if (self.sizes > 0).any():
                self.codes = torch.where(chosen.sum(0)[:, None] > 0, self.codes.lerp(means, 0.2), self.codes)
        return x + (codes - x).detach(), {"commitment": ((x - codes) ** 2).mean()}


class Quantised(nn.Module):
    """A layer and its codebook, whose auxiliary loss is added to what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.codebook = nn.Linear(WIDTH, WIDTH), Codebook()

    def forward(self, x: Tensor) -> Tensor:
        codes, losses = self.codebook(self.layer(x))
        return codes + 0.1 * losses["commitment"]


class Messages(nn.Module):
    """Attention over the edges of a graph between the rows, self loops left out by a mask as GATConv does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, 1)
        self.register_buffer(
            "edges", torch.tensor([[0, 1, 2, 3, 2, 0], [1, 2, 3, 0, 2, 2]]), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        source, target = self.edges[:, self.edges[0] != self.edges[1]] % len(x)
        h = self.layer(x)
        scores = functional.leaky_relu(self.score(torch.cat([h[source], h[target]], -1)))
        weights = (scores - scores.max()).exp()
        total = torch.zeros(len(x), 1, dtype=weights.dtype).index_add(0, target, weights)
        made = torch.zeros_like(h, dtype=weights.dtype).index_add(0, target, weights * h[source])
        return h + made / total.clamp(min=1e-6)


class Capsule(nn.Module):
    """Routing between capsules until the couplings settle."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("ri,kio->rko", x, self.weight)
        logits, moved = torch.zeros(votes.shape[:2]), torch.tensor(1.0)
        for _ in range(5):
            couplings = logits.softmax(1)
            made = torch.tanh((couplings[..., None] * votes).sum(1))
            after = logits + (votes * made[:, None]).sum(-1)
            moved, logits = (after - logits).abs().max(), after
            if moved.item() < 0.05:
                break
        return x + made


class Noisy(nn.Module):
    """Dropout, a batch norm, and one draw more where values say so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.norm = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.drop(self.layer(x)))
        if self.training and x[0, 0] > 0:
            x = x + 0.1 * torch.randn_like(x)
        return torch.tanh(x)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "branch": Branch,
    "while loop": Equilibrium,
    "autograd.grad": Derivative,
    "vmap of grad": PerRow,
    "own backward": Reversal,
    "codebook": Quantised,
    "graph": Messages,
    "capsules": Capsule,
    "random": Noisy,
}


class GradientReversal(nn.Module):
    """The identity with a backward of its own, as domain-adversarial models have it: it can be traced, and loses it."""

    def forward(self, x: Tensor) -> Tensor:
        return _Reversed.apply(x)


class _DoubledExp(torch.autograd.Function):
    """Changes in place what the backward that autograd would derive needs."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = x.exp()
        y[:, 1:].mul_(2.0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


_doubled_exp = _DoubledExp.apply  # as libraries keep it


class InPlace(nn.Module):
    """A backward of its own whose forward autograd could not go back through."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(_doubled_exp(x))


class MadeInForward(nn.Module):
    """A backward of its own of a class that each forward makes."""

    def forward(self, x: Tensor) -> Tensor:
        class Reversed(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x: Tensor) -> Tensor:
                return x.view_as(x)

            @staticmethod
            def backward(ctx, gradient: Tensor) -> Tensor:
                return -0.5 * gradient

        return Reversed.apply(x)


TRACED_WRONGLY: dict[str, Callable[[], nn.Module]] = {
    "gradient reversal": GradientReversal,
    "in place": InPlace,
    "made in forward": MadeInForward,
}


def build(kind: str, layers: int = 2) -> nn.Module:
    """Linear layers around `layers` modules of a kind."""
    middle = [
        one for _ in range(layers) for one in ((KINDS | TRACED_WRONGLY)[kind](), nn.Linear(WIDTH, WIDTH))
    ]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *middle, nn.Tanh(), nn.Linear(WIDTH, CLASSES))


class Rows:
    """Rows of numbers and their classes; the number of the row is all that they depend on."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        row = torch.randn(WIDTH, generator=drawn) + 0.3 * torch.randn((), generator=drawn)
        return row, torch.randint(CLASSES, (), generator=drawn)
