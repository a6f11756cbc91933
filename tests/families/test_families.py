"""The job files of the families that the README names, as they stand: taken by the server's checks, trained in four stages,
equal to the loop that each library's own examples have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from service.cli.job_file import read_spec
from service.cli.local.plan import validated_job
from tests.tiers import some_by_day
from tests.worker.workers import Workers
from worker.data.sampler import BatchSampler, read_sample

HERE = Path(__file__).parent
STEPS = range(1, 4)


def causal():
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=4, vocab_size=96, **sizes))


def denoiser():
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def classifier():
    from transformers import AutoModelForImageClassification, ViTConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    return AutoModelForImageClassification.from_config(
        ViTConfig(num_hidden_layers=4, image_size=32, patch_size=8, num_labels=4, **sizes)
    )


def two_groups(model):
    named = dict(model.named_parameters())
    norms = [p for name, p in named.items() if "norm" in name]
    rest = [p for name, p in named.items() if "norm" not in name]
    return torch.optim.AdamW(
        [{"params": rest}, {"params": norms, "weight_decay": 0.0}], lr=1e-3, weight_decay=0.1
    )


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def language_loss(model, samples):
    return model(**{name: torch.stack([one[name] for one in samples]) for name in samples[0]}).loss


def diffusion_loss(model, samples):
    inputs = {name: torch.stack([one[name] for one, _ in samples]) for name in ("sample", "timestep")}
    return nn.functional.mse_loss(model(**inputs).sample, torch.stack([noise for _, noise in samples]))


def vision_loss(model, samples):
    logits = model(pixel_values=torch.stack([one["pixel_values"] for one, _ in samples])).logits
    labels = torch.tensor([label for _, label in samples])
    return nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)


FAMILIES = {
    "language": (causal, "Blocks", {"length": 16}, language_loss, two_groups, 1.0, None),
    "diffusion": (
        denoiser,
        "NoisyImages",
        {"side": 16},
        diffusion_loss,
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        1.0,
        None,
    ),
    "vision": (classifier, "Images", {"side": 32, "classes": 4}, vision_loss, momentum, None, 3),
}


@pytest.mark.slow
@some_by_day("family", FAMILIES, by_day=1)
def test_the_job_file_of_a_family_trains_as_its_librarys_own_loop(family, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    monkeypatch.syspath_prepend(str(HERE))  # what code.working_dir does on a worker
    import samples

    make, data_set, arguments, loss_of, optimizer_of, norm, cosine = FAMILIES[family]
    torch.manual_seed(0)
    model = make().train()
    data, count = getattr(samples, data_set)(**arguments), 4
    sampler = BatchSampler(len(data), 8, count, seed=0)
    optimizer = optimizer_of(model)
    schedule = cosine and torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=cosine)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = []
    for step in STEPS:
        optimizer.zero_grad()
        losses = []
        for microbatch in range(count):
            rows = [read_sample(data, i, seed=0, step=step) for i in sampler.indices(step, microbatch)]
            losses.append(loss_of(model, rows))
            (losses[-1] / count).backward()
        if norm:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        if schedule:
            schedule.step()
        expected.append(sum(loss.item() for loss in losses) / count)
    file = HERE / f"{family}.yaml"
    spec, folder = validated_job(read_spec(file), file)
    assert Path(folder) == HERE
    with Workers(spec) as run:
        assert run.losses(STEPS) == pytest.approx(expected, rel=1e-5)
        found = {n: t for w in run.workers for n, t in w.engine.state()["parameters"].items()}
    for name, parameter in model.named_parameters():
        if name.endswith(
            "to_k.bias"
        ):  # no softmax sees it: its gradient is rounding, of which Adam makes whole steps
            continue
        apart = (found[name] - parameter.detach()).norm() / (
            parameter.detach() - before[name]
        ).norm().clamp_min(1e-6)
        assert apart < 1e-2, (name, float(apart))


def test_the_readme_points_at_every_file_and_each_is_complete():
    readme = (HERE.parents[1] / "worker" / "README.md").read_text()
    files = sorted(path.name for path in HERE.glob("*.yaml"))
    assert files == sorted(f"{family}.yaml" for family in FAMILIES)
    for name in files:
        assert f"tests/families/{name}" in readme
        spec = yaml.safe_load((HERE / name).read_text())
        assert spec["code"]["working_dir"] == "." and spec["data"]["factory"].startswith("samples:")
