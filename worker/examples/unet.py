"""A small U-Net that removes noise from images; `build` is its factory.

Plain torch; knows nothing of pipelines.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class ConvBlock(nn.Module):
    """Two 3x3 convolutions with normalisation, and a shortcut."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(_groups(inside), inside)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm2 = nn.GroupNorm(_groups(outside), outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.shortcut = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(functional.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(functional.silu(self.norm2(h)))


class UNet(nn.Module):
    """noisy images [batch, channels, height, width] -> clean images of the same shape.

    Each level halves the sides; its result skips to the level's way up, where it is joined by
    concatenation. Sides must be divisible by 2 ** levels.
    """

    def __init__(self, *, channels: int, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList(ConvBlock(widths[level], widths[level]) for level in range(levels))
        self.shrink = nn.ModuleList(
            nn.Conv2d(widths[level], widths[level + 1], 3, stride=2, padding=1) for level in range(levels)
        )
        self.middle = ConvBlock(widths[-1], widths[-1])
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(widths[level + 1], widths[level], 2, stride=2)
            for level in reversed(range(levels))
        )
        self.up = nn.ModuleList(
            ConvBlock(2 * widths[level], widths[level]) for level in reversed(range(levels))
        )
        self.head = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, noisy: Tensor) -> Tensor:
        x = self.stem(noisy)
        skips = []
        for down, shrink in zip(self.down, self.shrink, strict=True):
            x = down(x)
            skips.append(x)
            x = shrink(x)
        x = self.middle(x)
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([skips.pop(), grow(x)], dim=1))
        return noisy + self.head(x)


def build(channels: int = 1, width: int = 32, levels: int = 2) -> UNet:
    """A U-Net of `levels` halvings; `width` channels at the top, doubled at each level."""
    return UNet(channels=channels, width=width, levels=levels)


def _groups(channels: int) -> int:
    return next(groups for groups in (8, 4, 2, 1) if channels % groups == 0)
