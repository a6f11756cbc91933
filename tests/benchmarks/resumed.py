"""`python -m tests.benchmarks.resumed`: jobs that go on with changes (checkpoint.resume_from) beside plain loops that do.

A GPT trains two steps on two meshes and is saved. Other jobs begin from that checkpoint, with more steps, another rate,
another batch and another layout, to step 6; a plain loop of torch takes over the same model and optimizer state and goes
on with the same changes. Cells: the greatest difference of a step's loss, and of a parameter behind the last step, but
for the biases of attention's keys: softmax does not see them, so their gradient is rounding, which Adam makes a step of.
A minute of a processor; no number depends on the machine's load.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from service.spec.job import JobSpec
from tests.worker.actor.test_actor import job as gpt
from tests.worker.jobs.test_resumed_with_changes import (
    SAVED,
    first_run,
    plain_continuation,
    resumed_run,
)

LAST = 6
LAYOUTS: dict[str, dict[str, Any]] = {
    "as before, 2 meshes": {},
    "1 mesh": {"parallelism": {"pp": 1}},
    "dp 2": {"parallelism": {"pp": 1, "dp": 2}},
    "dp 2, ZeRO-1": {"parallelism": {"pp": 1, "dp": 2}, "resources": {"shard": "optimizer"}},
    "tp 2": {"parallelism": {"pp": 1, "tp": 2}},
    "pp 3": {"parallelism": {"pp": 3}},
}
CHANGES: dict[str, dict[str, Any]] = {
    "more steps": {},
    "a tenth of the rate": {"optimizer": {"args": {"lr": 1e-3}}},
    "SGD in place of AdamW": {"optimizer": {"factory": "torch.optim:SGD", "args": {"lr": 0.1}}},
    "4 microbatches, not 2": {"training": {"microbatches": 4}},
}


def job(steps: int, change: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    """The stored form of the GPT's job with these changes."""
    spec = {**gpt(), "resources": {"meshes": 2, "device": "cpu"}}
    if "parallelism" in layout:
        spec["parallelism"] = layout["parallelism"]
        spec["pipeline"] = {"stages": layout["parallelism"]["pp"], "schedule": "1f1b"}
        spec["resources"] = {"device": "cpu", **layout.get("resources", {})}
    spec["training"] = {**spec["training"], **change.get("training", {}), "steps": steps}
    spec["optimizer"] = change.get("optimizer", spec["optimizer"])
    if "optimizer" in change:
        spec["optimizer"] = {"factory": "torch.optim:AdamW", **change["optimizer"]}
    return JobSpec.model_validate(spec).model_dump(mode="json")


def difference(folder: Path, before: dict[str, Any], after: dict[str, Any], run: str) -> tuple[float, float]:
    """The greatest differences of losses and of parameters between the resumed job and the plain loop."""
    losses, parameters, _ = resumed_run(folder, after, last=LAST, job_id=run)
    plain = plain_continuation(before, after)
    expected = plain.train(range(SAVED + 1, LAST + 1)).losses
    of_loss = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
    of_parameters = max(
        (_seen_by_the_loss(name, parameters[name]) - _seen_by_the_loss(name, tensor.detach()))
        .abs()
        .max()
        .item()
        for name, tensor in plain.model.named_parameters()
        if name in parameters
    )
    return of_loss, of_parameters


def _seen_by_the_loss(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A parameter without the biases of attention's keys, the second third of those of query, key and value."""
    if not name.endswith("attention.qkv.bias"):
        return tensor
    query, _, value = tensor.chunk(3)
    return torch.cat([query, value])


def table(folder: Path) -> list[str]:
    """Rows: what was changed; columns: where the job went on."""
    before = job(SAVED, {}, {})
    first_run(folder, before)
    lines = [f"| changed | {' | '.join(LAYOUTS)} |", "|---" * (len(LAYOUTS) + 1) + "|"]
    for number, (name, change) in enumerate(CHANGES.items()):
        cells = []
        for column, layout in enumerate(LAYOUTS.values()):
            found = difference(folder, before, job(LAST, change, layout), f"run-{number}-{column}")
            cells.append("0, 0" if found == (0.0, 0.0) else f"{found[0]:.1e}, {found[1]:.1e}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(table(Path(folder))))


if __name__ == "__main__":
    main()
