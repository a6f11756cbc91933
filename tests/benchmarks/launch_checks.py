"""`python -m tests.benchmarks.launch_checks`: seconds that the checks before training add to a launch, by model.

One worker in a process of its own does what the first worker of a job does: reads samples, builds, traces, compares the
trace with the model, tries loss and optimizer. Each part is timed alone, each model in a new process, so that what a part
imports for the first time counts. Models of transformers and diffusers are the small ones of `make bench-models`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from service.spec.job import JobSpec

MODELS = (
    "GPT of README, 8 layers of 128",
    "GPT, 12 layers of 768",
    "U-Net of the demo",
    "GPT-2",
    "BERT",
    "T5",
    "ViT",
    "UNet2DModel",
)
_LIMIT_S = 900.0
_TEXTS = {"factory": "worker.examples.text:ByteWindows", "args": {"length": 64}}
_ADAMW = {"factory": "torch.optim:AdamW", "args": {"lr": 1e-3}}
_OWN: dict[str, dict[str, Any]] = {
    MODELS[0]: {
        "model": {
            "factory": "worker.examples.gpt:build",
            "args": {"layers": 8, "width": 128, "length": 64},
        },
        "data": _TEXTS,
        "loss": {"factory": "torch.nn.functional:cross_entropy"},
        "training": {"steps": 100, "global_batch": 32, "microbatches": 8},
    },
    MODELS[1]: {
        "model": {
            "factory": "worker.examples.gpt:build",
            "args": {"layers": 12, "width": 768, "heads": 12, "length": 64},
        },
        "data": _TEXTS,
        "loss": {"factory": "torch.nn.functional:cross_entropy"},
        "training": {"steps": 100, "global_batch": 32, "microbatches": 8},
    },
    MODELS[2]: {
        "model": {"factory": "worker.examples.unet:build"},
        "data": {"factory": "worker.examples.digits:NoisyDigits"},
        "loss": {"factory": "torch.nn.functional:mse_loss"},
        "training": {"steps": 60, "global_batch": 32, "microbatches": 4},
    },
}


def main() -> int:
    """Print the table, a model a row; fails where a model's checks do."""
    rows = [_measured_elsewhere(name) for name in MODELS]
    parts = [*rows[0]][1:]
    print(f"| model | parameters | {' | '.join(parts[1:])} | checks of all |")
    print("|---" * (len(parts) + 2) + "|")
    for row in rows:
        checks = row["compare"] + row["loss"] + row["optimizer"]
        share = checks / (checks + row["build and trace"])
        seconds = " | ".join(f"{row[part]:.2f}" for part in parts[1:])
        print(f"| {row['model']} | {row['parameters']:,} | {seconds} | {checks:.2f} s, {share:.0%} |")
    return 0


def _measured_elsewhere(name: str) -> dict[str, Any]:
    """The row of a model, measured by a new process."""
    command = [sys.executable, "-m", "tests.benchmarks.launch_checks", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def measure(name: str) -> dict[str, Any]:
    """The seconds of each part of a worker's start, and the model's parameters."""
    from worker.actor import model_host, prepared
    from worker.contract.job import Job
    from worker.verify.local_gang import prepare_workers

    job = Job.from_json(JobSpec.model_validate(_spec_of(name)).model_dump(mode="json"))
    seconds = {"build and trace": 0.0, "compare": 0.0, "loss": 0.0, "optimizer": 0.0}
    worker = prepare_workers(job)[0]
    with contextlib.ExitStack() as timed:
        for owner, part, method in (
            (model_host.JobModel, "build and trace", "traced"),
            (model_host.JobModel, "compare", "_check_trace"),
            (model_host.JobModel, "loss", "_check_loss"),
            (prepared, "optimizer", "check_layout_of_optimizer"),
            (prepared, "optimizer", "check_optimizer_of_model"),
        ):
            timed.enter_context(_timed(owner, method, seconds, part))
        worker.optimizer_state()
        worker.trace(job.training.microbatches)
    seconds["compare"] -= seconds["loss"]  # which is tried within it
    parameters = sum(p.numel() for p in worker.model.trained_parameters().values())
    return {"model": name, "parameters": parameters, **seconds}


def _spec_of(name: str) -> dict[str, Any]:
    from tests.benchmarks.models.catalogue import ENTRIES

    if name in _OWN:
        spec = {"optimizer": _ADAMW, "pipeline": {"stages": 2}, **_OWN[name]}
    else:
        spec = ENTRIES[name].job(stages=2, meshes=2, steps=10) | {"optimizer": _ADAMW}
    return {"name": "checks", **spec, "resources": {"meshes": 2, "device": "cpu"}}


@contextlib.contextmanager
def _timed(owner: Any, method: str, seconds: dict[str, float], part: str) -> Iterator[None]:
    """Calls of `owner.method` add their time to `seconds[part]`; one within another of the same part counts once."""
    called, depth = getattr(owner, method), 0

    @functools.wraps(called)
    def instead(*arguments: Any, **keywords: Any) -> Any:
        nonlocal depth
        depth += 1
        began = time.perf_counter()
        try:
            return called(*arguments, **keywords)
        finally:
            depth -= 1
            if not depth:
                seconds[part] += time.perf_counter() - began

    with mock.patch.object(owner, method, instead):
        yield


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        sys.exit(0)
    sys.exit(main())
