"""The data sets of the job files beside this: your own module, which travels with the job (`code.working_dir`)."""

from __future__ import annotations

import torch
from diffusers import DDPMScheduler


class Blocks:
    """A language model's samples: a block of tokens, which is its own target (the model shifts it)."""

    def __init__(self, length: int, words: int = 96):
        self.length, self.words = length, words

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = torch.tensor(index * 7 % self.words)
        tokens = (start + torch.arange(self.length).square()) % self.words
        return {"input_ids": tokens, "labels": tokens}


class NoisyImages:
    """A diffusion model's samples: an image with noise, how much, and the noise as the target.

    Noise and time are drawn here, by torch's own generator: Slotline seeds it by seed, step and index, so that every epoch
    has other noise, and every worker the same.
    """

    def __init__(self, side: int):
        self.side, self.noising = side, DDPMScheduler(num_train_timesteps=100)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        image = _image(index, self.side)
        noise, time = torch.randn_like(image), torch.randint(100, ())
        noisy = self.noising.add_noise(image[None], noise[None], time[None])[0]
        return {"sample": noisy, "timestep": time}, noise


class Images:
    """A classifier's samples: an image, turned over at random, and its class."""

    def __init__(self, side: int, classes: int):
        self.side, self.classes = side, classes

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], int]:
        image = _image(index, self.side)
        turned = image.flip(-1) if torch.rand(()) < 0.5 else image
        return {"pixel_values": turned}, index % self.classes


def _image(index: int, side: int) -> torch.Tensor:
    return torch.randn(3, side, side, generator=torch.Generator().manual_seed(index))
