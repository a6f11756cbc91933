"""Public models and modules that were refused, in jobs of one to four stages beside their plain loops.

`python -m tests.benchmarks.opaque`, about five minutes. The libraries are no extra of ours: one that is not installed is
left out (pip install vector-quantize-pytorch st-moe-pytorch torch_geometric neuraloperator demucs x-transformers). Losses
and parameters of four steps of four microbatches, SGD with momentum, clipped, beside the words of the refusal when a
review tried them; the results are in results/opaque.md.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from service.spec.job import JobSpec
from tests.worker.model import opaque_models
from tests.worker.plain_job import PlainJob
from tests.worker.verify.proving import proof_of
from tests.worker.workers import Workers
from worker.model.opaque.call import opaque_calls

STEPS = range(1, 5)
WIDTH, TOKENS, CLASSES, WORDS = 16, 6, 3, 11
SOUND_LENGTH, SOUND_RATE = 4096, 8192


class Codes(nn.Module):
    """vector-quantize-pytorch between layers; its loss is added to the logits."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        from vector_quantize_pytorch import VectorQuantize

        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.codes = VectorQuantize(dim=WIDTH, codebook_size=16, **options)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        codes, _, loss = self.codes(self.first(x))
        return self.last(codes).mean(1) + loss.sum()


class Experts(nn.Module):
    """Two blocks of st-moe-pytorch."""

    def __init__(self) -> None:
        super().__init__()
        from st_moe_pytorch import MoE, SparseMoEBlock

        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(
            SparseMoEBlock(
                MoE(dim=WIDTH, num_experts=4, gating_top_n=2), add_ff_before=True, add_ff_after=True
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x, losses = self.first(x), 0.0
        for block in self.blocks:
            x, loss, *_ = block(x)
            losses = losses + loss
        return self.last(x).mean(1) + losses


class Graph(nn.Module):
    """Two layers of torch_geometric on a graph for each sample."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        from torch_geometric import nn as layers

        made = getattr(layers, layer)
        self.first, self.second = made(WIDTH, WIDTH), made(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]]))

    def forward(self, x: Tensor) -> Tensor:
        samples = len(x)
        edges = torch.cat([self.edges + TOKENS * sample for sample in range(samples)], 1)
        nodes = torch.relu(self.first(x.flatten(0, 1), edges))
        nodes = torch.relu(self.second(nodes, edges))
        return self.last(nodes.unflatten(0, (samples, TOKENS)).mean(1))


def fourier_operator() -> nn.Module:
    """neuraloperator's FNO, whose weights are complex."""
    from neuralop.models import FNO

    return FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=4)


def music_separation() -> nn.Module:
    """demucs' HTDemucs, small."""
    from demucs.htdemucs import HTDemucs

    return HTDemucs(
        sources=["first", "second"],
        channels=8,
        depth=3,
        nfft=256,
        t_layers=1,
        t_heads=2,
        bottom_channels=16,
        segment=SOUND_LENGTH / SOUND_RATE,
        samplerate=SOUND_RATE,
    )


def gated_transformer() -> nn.Module:
    """A language model of x-transformers with ALiBi and gated residuals."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=WIDTH, depth=4, heads=2, attn_dim_head=8, alibi_pos_bias=True, gate_residual=True)
    return TransformerWrapper(num_tokens=WORDS, max_seq_len=TOKENS, attn_layers=layers)


class Pictures:
    """Pictures, and others that are to come of them."""

    shape: tuple[int, ...] = (1, 16, 16)
    target_shape: tuple[int, ...] = (1, 16, 16)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(self.shape, generator=drawn), torch.randn(self.target_shape, generator=drawn)


class Sounds(Pictures):
    """Sounds in stereo, and two sources in each."""

    shape, target_shape = (2, SOUND_LENGTH), (2, 2, SOUND_LENGTH)


class Words:
    """Sequences of words, each its own target."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(WORDS, (TOKENS,), generator=torch.Generator().manual_seed(index))
        return drawn, drawn


def of_words(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of all words."""
    return cross_entropy(output.flatten(0, 1), target.flatten())


class Tokens:
    """Sequences of rows of numbers, and their classes."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(TOKENS, WIDTH, generator=drawn), torch.randint(CLASSES, (), generator=drawn)


@dataclass(frozen=True)
class Case:
    """A model of a package, its data and loss, and the words of the refusal that it met (of the review of models)."""

    package: str
    stages: int
    model: dict[str, Any]
    before: str
    data: str = "Tokens"
    loss: str = "torch.nn.functional:cross_entropy"


VALUES = "data-dependent: decided by the values of a tensor"
COMPLEX = "a complex parameter"


def _public(factory: str, package: str, stages: int, before: str, **arguments: Any) -> Case:
    return Case(package, stages, {"factory": f"{__name__}:{factory}", "args": arguments}, before)


def _own(kind: str, before: str) -> Case:
    model = {"factory": f"{opaque_models.__name__}:build", "args": {"kind": kind}}
    return Case("torch", 4, model, before, data="Rows")


SQUARES = "torch.nn.functional:mse_loss"
MODELS = {
    "VectorQuantize": _public("Codes", "vector_quantize_pytorch", 4, VALUES),
    "VectorQuantize, cosine": _public("Codes", "vector_quantize_pytorch", 4, VALUES, use_cosine_sim=True),
    "VectorQuantize, k-means": _public("Codes", "vector_quantize_pytorch", 4, VALUES, kmeans_init=True),
    "st-moe": _public("Experts", "st_moe_pytorch", 4, VALUES),
    "GATConv": _public("Graph", "torch_geometric", 3, VALUES, layer="GATConv"),
    "GCNConv": _public("Graph", "torch_geometric", 3, VALUES, layer="GCNConv"),
    "neuraloperator's FNO": replace(
        _public("fourier_operator", "neuralop", 4, COMPLEX), data="Pictures", loss=SQUARES
    ),
    "HTDemucs": replace(_public("music_separation", "demucs", 1, VALUES), data="Sounds", loss=SQUARES),
    "x-transformers, ALiBi and gates": replace(
        _public("gated_transformer", "x_transformers", 4, "GuardOnDataDependentSymNode, as the user's error"),
        data="Words",
        loss=f"{__name__}:of_words",
    ),
    **{kind: _own(kind, VALUES) for kind in ("branch", "while loop", "graph", "capsules", "codebook")},
    "autograd.grad": _own("autograd.grad", "element 0 of tensors does not require grad"),
    "vmap of grad": _own("vmap of grad", "Cannot access storage of BatchedTensorImpl"),
    "own backward": _own("own backward", "gradients differ between the traced model and the model"),
    "gradient reversal": _own("gradient reversal", "gradients differ between the traced model and the model"),
}


def main() -> int:
    print(
        "| model | refused with | stages | run as they are | loss | parameters |\n|---|---|---|---|---|---|"
    )
    different = 0
    for name, case in MODELS.items():
        begin = f"| {name} | {case.before} | {case.stages} |"
        if importlib.util.find_spec(case.package) is None:
            print(f"{begin} {case.package} is not installed | | |", flush=True)
            continue
        spec = _job(case)
        opaque, loss, moved = compare(spec)
        shown, equal = f"{loss:.0e} | {moved:.0e}", loss <= 1e-5 and moved <= 1e-3
        if not equal:  # with other random numbers: those of the pipeline, in the plain model
            proof = proof_of(spec)
            equal = proof.difference is None
            shown = f"{'equal' if equal else proof.difference} | as `slotline verify` draws"
        different += not equal
        print(f"{begin} {', '.join(opaque) or 'none'} | {shown} |", flush=True)
    return int(different > 0)


def _job(case: Case) -> dict[str, Any]:
    place = opaque_models.__name__ if case.data == "Rows" else __name__
    spec = {
        "model": case.model,
        "data": {"factory": f"{place}:{case.data}"},
        "loss": {"factory": case.loss},
        "optimizer": {"factory": "torch.optim:SGD", "args": {"lr": 0.05, "momentum": 0.9}},
        "training": {
            **{"steps": len(STEPS), "global_batch": 16, "microbatches": 4, "seed": 7},
            "clip_grad_norm": 1.0,
        },
        "pipeline": {"stages": case.stages, "schedule": "zb-h1"},
        "resources": {"meshes": case.stages, "device": "cpu"},
    }
    return JobSpec.model_validate(spec).model_dump(mode="json")


def compare(spec: dict[str, Any]) -> tuple[list[str], float, float]:
    """The modules that run as they are, the greatest relative difference of a step's loss, and that of a parameter or
    buffer, where a worker holds all of it, as a part of what it moved."""
    plain = PlainJob(spec)
    before = {name: value.detach().clone() for name, value in _state(plain.model).items()}
    expected = plain.train(STEPS).losses
    with Workers(spec) as run:
        losses = run.losses(STEPS)
        states = run.call(lambda worker: worker.engine.state())
        opaque = _opaque_modules(run)
    after = _state(plain.model)
    loss = max(abs(one - other) / abs(other) for one, other in zip(losses, expected, strict=True))
    moved = 0.0
    for state in states:
        for name, value in {**state["parameters"], **state["buffers"]}.items():
            if not (value.is_floating_point() or value.is_complex()) or value.shape != after[name].shape:
                continue
            if (change := (after[name] - before[name]).norm()) > 0:
                moved = max(moved, float((value - after[name]).norm() / change))
    return opaque, loss, moved


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _opaque_modules(run: Workers) -> list[str]:
    stages = [stage for worker in run.workers for stage in worker.stages.values()]
    return list(dict.fromkeys(call.record.path for stage in stages for call in opaque_calls(stage)))


if __name__ == "__main__":
    sys.exit(main())
