"""Small models of five architectures of `tests/benchmarks/unfamiliar.py`, built as their libraries build them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, LENGTH, WORDS, CLASSES = 8, 8, 24, 4
STREAMED = 19
"""Samples of a stream, which no batch divides."""


class Attention(nn.Module):
    """Multi-head attention over `memory`; `mask` is added to its scores."""

    def __init__(self, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            made.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for made in (self.query(x), self.key(memory), self.value(memory))
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores + mask
        weights = functional.softmax(scores.float(), dim=-1).to(v.dtype)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def feed_forward() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class EncoderLayer(nn.Module):
    """Norms behind the sums, as BERT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), feed_forward()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norms[0](x + self.attention(x, x, mask))
        return self.norms[1](x + self.mlp(x))


class Pooling(nn.Module):
    """The mean over words that are no padding, in a dict, as sentence-transformers hands features on."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = features["attention_mask"][..., None].to(features["token_embeddings"].dtype)
        total = (features["token_embeddings"] * mask).sum(1)
        return features | {"sentence_embedding": total / mask.sum(1).clamp(min=1e-9)}


class SentenceTransformer(nn.Module):
    """An encoder on padded rows of words, pooling, a dense layer, and the length of one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList([EncoderLayer(), EncoderLayer()])
        self.pooling, self.dense = Pooling(), nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        mask = (words > 3).long()
        hidden = (1.0 - mask[:, None, None, :].float()) * -1e4
        x = self.norm(self.words(words) + self.positions(torch.arange(words.shape[1], device=words.device)))
        for layer in self.layers:
            x = layer(x, hidden)
        features = self.pooling({"token_embeddings": x, "attention_mask": mask})
        return functional.normalize(torch.tanh(self.dense(features["sentence_embedding"])), p=2, dim=1)


class ResidualBlock(nn.Module):
    """Norms before attention and layers; with `cross`, attention over what is heard."""

    def __init__(self, cross: bool = False):
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.cross_norm = nn.LayerNorm(WIDTH) if cross else None
        self.cross = Attention() if cross else None
        self.mlp_norm, self.mlp = nn.LayerNorm(WIDTH), feed_forward()

    def forward(self, x: Tensor, heard: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, mask)
        if self.cross is not None:
            x = x + self.cross(self.cross_norm(x), heard)
        return x + self.mlp(self.mlp_norm(x))


class Whisper(nn.Module):
    """Convolutions and blocks over sound, a decoder over words, and logits by the table of words itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(4, WIDTH, 3, padding=1)
        self.conv2 = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        waves = torch.arange(LENGTH)[:, None] * torch.exp(-torch.arange(WIDTH // 2) / 2.0)
        self.register_buffer("sinusoids", torch.cat([waves.sin(), waves.cos()], 1))
        self.encoder, self.encoder_norm = ResidualBlock(), nn.LayerNorm(WIDTH)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.decoder = nn.ModuleList([ResidualBlock(cross=True), ResidualBlock(cross=True)])
        self.norm = nn.LayerNorm(WIDTH)
        mask = torch.full((LENGTH, LENGTH), -torch.inf).triu_(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, mel: Tensor, words: Tensor) -> Tensor:
        x = functional.gelu(self.conv2(functional.gelu(self.conv1(mel)))).transpose(1, 2)
        heard = self.encoder_norm(self.encoder((x + self.sinusoids).to(x.dtype)))
        x = self.words(words) + self.positions[: words.shape[1]]
        for block in self.decoder:
            x = block(x, heard, self.mask[: words.shape[1], : words.shape[1]])
        x = self.norm(x)
        return (x @ self.words.weight.to(x.dtype).T).float()


class _Swish(torch.autograd.Function):
    """Keeps its input and computes the sigmoid again in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(x)
        return gradient * (sigmoid * (1 + x * (1 - sigmoid)))


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Swish.apply(x)


class MBConv(nn.Module):
    """A wider layer, a convolution of each channel, squeeze and excitation, and a narrow layer."""

    def __init__(self, channels: int, out: int, stride: int = 1, wider: int = 2):
        super().__init__()
        wide = wider * channels
        self.expand, self.norm0 = nn.Conv2d(channels, wide, 1, bias=False), _norm(wide)
        self.depthwise = nn.Conv2d(wide, wide, 3, stride, padding=1, groups=wide, bias=False)
        self.norm1, self.norm2 = _norm(wide), _norm(out)
        self.reduce, self.excite = nn.Conv2d(wide, 2, 1), nn.Conv2d(2, wide, 1)
        self.project = nn.Conv2d(wide, out, 1, bias=False)
        self.swish, self.skips = Swish(), stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y = self.swish(self.norm0(self.expand(x)))
        y = self.swish(self.norm1(self.depthwise(y)))
        squeezed = functional.adaptive_avg_pool2d(y, 1)
        y = torch.sigmoid(self.excite(self.swish(self.reduce(squeezed)))) * y
        y = self.norm2(self.project(y))
        return y + x if self.skips else y


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, momentum=0.01, eps=1e-3)


class EfficientNet(nn.Module):
    """Batch norms, an activation with a backward of its own, and a classifier of the mean over an image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, 2, padding=1, bias=False), _norm(4)
        self.blocks = nn.ModuleList([MBConv(4, 4), MBConv(4, 8, 2), MBConv(8, 8)])
        self.head, self.head_norm = nn.Conv2d(8, 16, 1, bias=False), _norm(16)
        self.swish, self.classifier = Swish(), nn.Linear(16, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.swish(self.norm(self.stem(image)))
        for block in self.blocks:
            x = block(x)
        x = self.swish(self.head_norm(self.head(x)))
        return self.classifier(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class ForecastBlock(nn.Module):
    """What a window is explained by and what it forecasts, from a pooled window and what is known beside it."""

    def __init__(self, window: int, ahead: int, pooling: int, coarser: int):
        super().__init__()
        self.window, self.ahead = window, ahead
        self.pooling = nn.MaxPool1d(pooling, stride=pooling, ceil_mode=True)
        known = math.ceil(window / pooling) + 2 * (window + ahead)
        self.knots = max(ahead // coarser, 1)
        self.layers = nn.Sequential(nn.Linear(known, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.theta = nn.Linear(16, window + self.knots)

    def forward(self, window: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        pooled = self.pooling(window[:, None])[:, 0]
        theta = self.theta(self.layers(torch.cat([pooled, before.flatten(1), after.flatten(1)], 1)))
        knots = theta[:, None, self.window :]
        forecast = functional.interpolate(knots, size=self.ahead, mode="linear")[:, 0]
        return theta[:, : self.window], forecast


class NHiTS(nn.Module):
    """Blocks of which each explains what the ones before left, over three inputs."""

    def __init__(self, window: int = 12, ahead: int = 6):
        super().__init__()
        self.blocks = nn.ModuleList(
            ForecastBlock(window, ahead, pooling, coarser) for pooling, coarser in ((4, 6), (2, 3), (1, 1))
        )
        self.ahead = ahead

    def forward(self, seen: Tensor, before: Tensor, after: Tensor) -> Tensor:
        left = seen.flip(-1)
        forecast = seen[:, -1:].expand(-1, self.ahead)
        for block in self.blocks:
            explained, more = block(left, before, after)
            left, forecast = left - explained, forecast + more
        return forecast


class DenseBlock(nn.Module):
    """Each convolution sees the results of all before it; a fifth of the last is added."""

    def __init__(self, channels: int, grown: int):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(channels + k * grown, grown if k < 2 else channels, 3, padding=1) for k in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for conv in self.convs[:-1]:
            made.append(functional.leaky_relu(conv(torch.cat(made, 1)), 0.2))
        return x + 0.2 * self.convs[-1](torch.cat(made, 1))


class RRDBNet(nn.Module):
    """Residuals in residuals, and an image twice as large."""

    def __init__(self, channels: int = 4):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.trunk = nn.ModuleList(
            nn.Sequential(DenseBlock(channels, 2), DenseBlock(channels, 2)) for _ in range(2)
        )
        self.behind = nn.Conv2d(channels, channels, 3, padding=1)
        self.larger = nn.Conv2d(channels, channels, 3, padding=1)
        self.last = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        first = self.first(image)
        x = first
        for dense in self.trunk:
            x = x + 0.2 * dense(x)
        x = first + self.behind(x)
        x = functional.interpolate(x, scale_factor=2, mode="nearest")
        return self.last(functional.leaky_relu(self.larger(x), 0.2))


def next_words(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of every word of a row."""
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Drawn:
    """Samples of `inputs` and a `target`: shapes of random numbers, `[shape, n]` of whole numbers below n."""

    def __init__(self, inputs: Sequence[Any], target: Any):
        self._inputs, self._target = inputs, target

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, ...], Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return tuple(_drawn(shape, drawn) for shape in self._inputs), _drawn(self._target, drawn)


class Streamed:
    """The same samples in their order, by no index."""

    def __init__(self, inputs: Sequence[Any], target: Any):
        self._samples = Drawn(inputs, target)

    def __iter__(self) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
        return (self._samples[index] for index in range(STREAMED))


def _drawn(shape: Any, generator: torch.Generator) -> Tensor:
    if len(shape) == 2 and isinstance(shape[0], list):
        return torch.randint(shape[1], tuple(shape[0]), generator=generator)
    return torch.randn(tuple(shape), generator=generator)
