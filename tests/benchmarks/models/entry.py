"""What the table has a row for: a public model as a job file names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HOUSE = "tests.benchmarks.models"


@dataclass(frozen=True)
class Entry:
    """A model by import path and arguments, the samples that it takes and the loss (None: its own).

    `output` names one of several tensors that it returns. `wrapped` says in a word what a user has to write around it,
    and is None for a model as it is. `needs_extra` is what only the folder of `make bench-models` holds.
    """

    name: str
    library: str
    factory: str
    args: Mapping[str, Any]
    samples: str
    loss: str | None = None
    output: str | None = None
    wrapped: str | None = None
    needs_extra: bool = False
    samples_args: Mapping[str, Any] = field(default_factory=dict)

    def job(self, *, stages: int, meshes: int, steps: int) -> dict[str, Any]:
        """The job file, as JSON: momentum and clipping on, the schedule searched."""
        model = {"factory": self.factory, "args": dict(self.args)}
        return {
            "model": model | ({"output": self.output} if self.output else {}),
            "data": {"factory": f"{HOUSE}.samples:{self.samples}", "args": dict(self.samples_args)},
            **({"loss": {"factory": self.loss}} if self.loss else {}),
            "optimizer": {"factory": "torch.optim:SGD", "args": {"lr": 0.02, "momentum": 0.9}},
            "training": {
                "steps": steps,
                "global_batch": 8,
                "microbatches": 4,
                "seed": 7,
                "clip_grad_norm": 1.0,
            },
            "pipeline": {"stages": stages, "schedule": "auto"},
            "resources": {"meshes": meshes},
        }


def transformers(
    name: str, model: str, config: str, args: Mapping[str, Any], samples: str, **more: Any
) -> Entry:
    """A model of transformers, of a configuration of its own."""
    made = {"config": {"factory": f"transformers:{config}", "args": dict(args)}}
    return Entry(name, "transformers", f"transformers:{model}", made, samples, **more)
