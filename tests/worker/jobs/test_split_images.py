"""Image models train in split backwards as in a plain loop: their attention leaves tensors in channels-last order,
for which torch's backward of a group norm needs the gradient of its input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.worker.actor.test_actor import job
from tests.worker.workers import Workers
from worker.data.sampler import BatchSampler
from worker.model.factory import build_model

SIDE, CHANNELS = 8, 8


class Noise:
    """Images and a time each, and what the noise in them is."""

    def __init__(self, *, channels, timed):
        self._channels, self._timed = channels, timed

    def __len__(self):
        return 24

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        image, noise = (torch.randn(self._channels, SIDE, SIDE, generator=draw) for _ in range(2))
        return ((image, torch.tensor(index)) if self._timed else image), noise


class PixelAttention(nn.Module):
    """Attention of pixels to each other, which leaves the image in channels-last order, as diffusers' does."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, CHANNELS)
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)

    def forward(self, x):
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(pixels).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return mixed.transpose(1, 2).reshape(x.shape) + x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = PixelAttention()
        self.norm = nn.GroupNorm(4, CHANNELS)
        self.convolution = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x):
        x = self.attention(x)
        return x + self.convolution(nn.functional.silu(self.norm(x)))


def small_denoiser():
    return nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, padding=1), *(Block() for _ in range(3)), nn.Conv2d(CHANNELS, 3, 1)
    )


UNET = {
    "sample_size": SIDE,
    "layers_per_block": 1,
    "block_out_channels": [8, 16],
    "norm_num_groups": 4,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
}


def spec_of(model, timed):
    spec = job(stages=4, meshes=4)
    spec["model"] = model
    spec["data"] = {"factory": f"{__name__}:Noise", "args": {"channels": 3, "timed": timed}}
    spec["loss"] = {"factory": "torch.nn:MSELoss"}
    spec["pipeline"]["schedule"] = "zb-h1"
    spec["training"]["microbatches"] = 4
    return spec


def plain_losses(spec, steps):
    training, count = spec["training"], spec["training"]["microbatches"]
    model = build_model(spec["model"]["factory"], spec["model"].get("args", {}), seed=training["seed"])
    data = Noise(**spec["data"]["args"])
    sampler = BatchSampler(len(data), training["global_batch"], count, seed=training["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in steps:
        optimizer.zero_grad()
        losses = []
        for m in range(count):
            samples = [data[index] for index in sampler.indices(step, m)]
            given = [sample if isinstance(sample, tuple) else (sample,) for sample, _ in samples]
            made = model(*(torch.stack(column) for column in zip(*given, strict=True)))
            made = getattr(made, "sample", made)
            loss = nn.functional.mse_loss(made, torch.stack([noise for _, noise in samples]))
            (loss / count).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), training["clip_grad_norm"])
        optimizer.step()
        found.append(sum(losses) / count)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["blocks", "UNet2DModel"])
def test_an_image_model_with_group_norms_trains_in_split_backwards_as_in_a_plain_loop(kind):
    model = {"factory": f"{__name__}:small_denoiser"}
    if kind != "blocks":
        pytest.importorskip("diffusers")
        model = {"factory": f"diffusers:{kind}", "args": UNET}
    spec = spec_of(model, timed=kind != "blocks")
    expected = plain_losses(spec, range(1, 4))
    with Workers(spec) as run:
        assert run.losses(range(1, 4)) == pytest.approx(expected, rel=1e-5)
