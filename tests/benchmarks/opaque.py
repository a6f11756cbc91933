"""Public modules that no trace takes, in jobs of three and four stages beside their plain loops.

`python -m tests.benchmarks.opaque`, about three minutes. The libraries are no extra of ours: one that is not installed is
left out (pip install vector-quantize-pytorch st-moe-pytorch torch_geometric). Losses and parameters of four steps of four
microbatches, SGD with momentum, clipped; the results are in results/opaque.md.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch
from torch import Tensor, nn

from service.spec.job import JobSpec
from tests.worker.model import opaque_models
from tests.worker.plain_job import PlainJob
from tests.worker.verify.proving import proof_of
from tests.worker.workers import Workers
from worker.model.opaque.call import opaque_calls

STEPS = range(1, 5)
WIDTH, TOKENS, CLASSES = 16, 6, 3


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


class Tokens:
    """Sequences of rows of numbers, and their classes."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(TOKENS, WIDTH, generator=drawn), torch.randint(CLASSES, (), generator=drawn)


def _public(
    factory: str, package: str, stages: int, **arguments: Any
) -> tuple[str, int, dict[str, Any], str]:
    return package, stages, {"factory": f"{__name__}:{factory}", "args": arguments}, "Tokens"


def _own(kind: str) -> tuple[str, int, dict[str, Any], str]:
    return "torch", 4, {"factory": f"{opaque_models.__name__}:build", "args": {"kind": kind}}, "Rows"


MODELS = {
    "VectorQuantize": _public("Codes", "vector_quantize_pytorch", 4),
    "VectorQuantize, cosine": _public("Codes", "vector_quantize_pytorch", 4, use_cosine_sim=True),
    "VectorQuantize, k-means": _public("Codes", "vector_quantize_pytorch", 4, kmeans_init=True),
    "st-moe": _public("Experts", "st_moe_pytorch", 4),
    "GATConv": _public("Graph", "torch_geometric", 3, layer="GATConv"),
    "GCNConv": _public("Graph", "torch_geometric", 3, layer="GCNConv"),
    **{kind: _own(kind) for kind in opaque_models.KINDS if kind != "random"},
    "gradient reversal": _own("gradient reversal"),
}


def main() -> int:
    print("| model | stages | run as they are | loss | parameters |\n|---|---|---|---|---|", flush=True)
    different = 0
    for name, (package, stages, model, data) in MODELS.items():
        if importlib.util.find_spec(package) is None:
            print(f"| {name} | {stages} | {package} is not installed | | |", flush=True)
            continue
        spec = _job(model, data, stages)
        opaque, loss, moved = compare(spec)
        shown, equal = f"{loss:.0e} | {moved:.0e}", loss <= 1e-5 and moved <= 1e-3
        if not equal:  # with other random numbers: those of the pipeline, in the plain model
            proof = proof_of(spec)
            equal = proof.difference is None
            shown = f"{'equal' if equal else proof.difference} | as `slotline verify` draws"
        different += not equal
        print(f"| {name} | {stages} | {', '.join(opaque)} | {shown} |", flush=True)
    return int(different > 0)


def _job(model: dict[str, Any], data: str, stages: int) -> dict[str, Any]:
    place = __name__ if data == "Tokens" else opaque_models.__name__
    spec = {
        "model": model,
        "data": {"factory": f"{place}:{data}"},
        "loss": {"factory": "torch.nn.functional:cross_entropy"},
        "optimizer": {"factory": "torch.optim:SGD", "args": {"lr": 0.05, "momentum": 0.9}},
        "training": {
            **{"steps": len(STEPS), "global_batch": 16, "microbatches": 4, "seed": 7},
            "clip_grad_norm": 1.0,
        },
        "pipeline": {"stages": stages, "schedule": "zb-h1"},
        "resources": {"meshes": stages, "device": "cpu"},
    }
    return JobSpec.model_validate(spec).model_dump(mode="json")


def compare(spec: dict[str, Any]) -> tuple[list[str], float, float]:
    """The modules that run as they are, the greatest relative difference of a step's loss, and that of a parameter or
    buffer, where a worker holds all of it, as a part of what it moved."""
    plain = PlainJob(spec)
    before = {name: value.clone() for name, value in plain.model.state_dict().items()}
    expected = plain.train(STEPS).losses
    with Workers(spec) as run:
        losses = run.losses(STEPS)
        states = run.call(lambda worker: worker.engine.state())
        opaque = _opaque_modules(run)
    after = plain.model.state_dict()
    loss = max(abs(one - other) / abs(other) for one, other in zip(losses, expected, strict=True))
    moved = 0.0
    for state in states:
        for name, value in {**state["parameters"], **state["buffers"]}.items():
            if not value.is_floating_point() or value.shape != after[name].shape:
                continue
            if (change := (after[name] - before[name]).norm()) > 0:
                moved = max(moved, float((value - after[name]).norm() / change))
    return opaque, loss, moved


def _opaque_modules(run: Workers) -> list[str]:
    stages = [stage for worker in run.workers for stage in worker.stages.values()]
    return list(dict.fromkeys(call.record.path for stage in stages for call in opaque_calls(stage)))


if __name__ == "__main__":
    sys.exit(main())
