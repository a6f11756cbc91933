"""`python -m tests.benchmarks.wrong_jobs`: 18 job files with a mistake each, the answers, and after how many seconds.

README's first job with one thing changed, each asked in a process of its own, as a person does: `slotline check`, which has
no server, and where only a server can know (queues, secrets, accelerators) `slotline submit` to a local one without GPUs.
tests/service/cli/test_wrong_jobs.py holds the answers. About four minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from service.cli.serve import LocalServer
from service.orchestrator.ray.local_ray import free_ports

RIGHT = """\
name: gpt-stdlib
model:     {factory: "worker.examples.gpt:build", args: {layers: 8, width: 128, length: 64}}
data:      {factory: "worker.examples.text:ByteWindows", args: {length: 64}}
loss:      {factory: "torch.nn.functional:cross_entropy"}
optimizer: {factory: "torch.optim:AdamW", args: {lr: 3.0e-3}}
training:  {steps: 100, global_batch: 32, microbatches: 8, clip_grad_norm: 1.0}
pipeline:  {stages: 4}
resources: {meshes: 4}
"""
_NO_SERVER = "http://127.0.0.1:9"
_ANSWER_LIMIT_S = 120.0
_READY_LIMIT_S = 20.0


@dataclass(frozen=True)
class WrongJob:
    """RIGHT with `before` replaced by `after` (or with `after` as a further line), and a part of the answer.

    `imports`: the answer takes a process that imports the job's modules. `asks`: only a server can know. `taken`: Slotline
    understands it as it is."""

    mistake: str
    after: str
    answer: str
    before: str = ""
    imports: bool = False
    asks: bool = False
    taken: bool = False

    @property
    def text(self) -> str:
        """The job file."""
        return RIGHT.replace(self.before, self.after) if self.before else f"{RIGHT}{self.after}\n"


WRONG_JOBS = (
    WrongJob(
        "an unknown field", "stage: 4", "pipeline.stage: unknown field: did you mean stages?", "stages: 4"
    ),
    WrongJob(
        "7 microbatches of 32 samples",
        "microbatches: 7",
        "training: global_batch 32 is not divisible by microbatches 7: set microbatches to 4, or global_batch",
        "microbatches: 8",
    ),
    WrongJob(
        "8 meshes for 4 stages",
        "meshes: 8",
        "error: resources.meshes 8 is more than pipeline.stages 4: a mesh would hold no stage; set resources.meshes to 4",
        "meshes: 4",
    ),
    WrongJob(
        "64 workers for a microbatch of 4",
        "parallelism: {pp: 4, dp: 64}",
        "error: a microbatch of 4 samples cannot be shared by 64 data-parallel workers of a mesh: choose a divisor of 4",
        "resources: {meshes: 4}",
    ),
    WrongJob(
        "a relative place of checkpoints",
        "checkpoint: {uri: runs, every_steps: 50}",
        "checkpoint.uri 'runs': is relative, and every worker has another current folder: give an absolute path",
    ),
    WrongJob(
        "a folder of code that is not there",
        "code: {working_dir: ./source}",
        "source' is no folder: correct it",
    ),
    WrongJob(
        "a queue that is not there",
        "queue: night",
        "queue 'night': there is no such queue: use one of default",
        asks=True,
    ),
    WrongJob(
        "a secret that is not set",
        "secrets: [HF_TOKEN]",
        "secrets 'HF_TOKEN': you have no such secret: `slotline secret set HF_TOKEN` first",
        asks=True,
    ),
    WrongJob("a name with a blank", "my gpt", "name: is no name: begin with a letter or digit", "gpt-stdlib"),
    WrongJob(
        "data without a colon",
        "text.ByteWindows",
        'data.factory: is no import path: write package.module:attribute, not "worker.examples.text.ByteWindows"',
        "text:ByteWindows",
    ),
    WrongJob(
        "a schedule in capitals",
        "stages: 4, schedule: 1F1B",
        "ok     model: GPT with 1,660,160 parameters",
        "stages: 4",
        imports=True,
        taken=True,
    ),
    WrongJob(
        "a loss by its name alone",
        "loss:      cross_entropy\n",
        "loss: is the text 'cross_entropy': name what makes it by its import path, as "
        '{factory: "torch.nn.functional:cross_entropy", args: {}}',
        'loss:      {factory: "torch.nn.functional:cross_entropy"}\n',
    ),
    WrongJob(
        "a brace that is not closed",
        "clip_grad_norm: 1.0\n",
        "is neither YAML nor JSON: expected ',' or '}', but got ':', line 7, column 9",
        "clip_grad_norm: 1.0}\n",
    ),
    WrongJob(
        "3e-3, which YAML 1.1 reads as text",
        "lr: 3e-3",
        "ok     optimizer: torch.optim:AdamW",
        "lr: 3.0e-3",
        imports=True,
        taken=True,
    ),
    WrongJob(
        "a factory misspelt",
        "gpt:biuld",
        "module worker.examples.gpt has no 'biuld'; it has Embedding, Attention, Block, GPT, build: did you mean build?",
        "gpt:build",
        imports=True,
    ),
    WrongJob(
        "a module misspelt",
        "examples.gtp:build",
        "there is no module 'worker.examples.gtp' (did you mean gpt?); check the spelling",
        "examples.gpt:build",
        imports=True,
    ),
    WrongJob(
        "an argument misspelt",
        "widht: 128",
        "model.args: factory 'worker.examples.gpt:build' has no argument 'widht' (did you mean width?); it takes layers,",
        "width: 128",
        imports=True,
    ),
    WrongJob(
        "GPUs where there are none",
        "meshes: 4, device: cuda",
        "needs 4 accelerators of GPU; the cluster has 0: add nodes, or submit with another resources.device",
        "meshes: 4",
        asks=True,
    ),
)


def _answered(job: WrongJob, folder: Path, url: str) -> tuple[str, float, float]:
    """The answer, and the seconds until it was there, of the clock and of processors."""
    file = folder / "job.yaml"
    file.write_text(job.text)
    before, begun = os.times(), time.monotonic()
    answer = _slotline("submit" if job.asks else "check", file, url)
    if job.asks and answer.startswith("job-"):
        answer = _reason(answer.split()[0], url)
    took_s, after = time.monotonic() - begun, os.times()
    processors_s = after.children_user + after.children_system - before.children_user - before.children_system
    return answer.replace(f"{folder}/", ""), took_s, processors_s


def _slotline(verb: str, argument: object, url: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "service.cli", verb, str(argument)],
        capture_output=True,
        text=True,
        timeout=_ANSWER_LIMIT_S,
        env={**os.environ, "SLOTLINE_URL": url, "COLUMNS": "500"},
    )
    lines = (done.stderr + done.stdout).strip().splitlines()
    told = [line for line in lines if not line.startswith(("ok     ", "  "))]
    return " ".join(told or lines)


def _reason(job_id: str, url: str) -> str:
    """What `slotline job` says of a job that waits, as soon as it says why."""
    deadline = time.monotonic() + _READY_LIMIT_S
    while (text := _slotline("job", job_id, url)).endswith(
        "step 0/100 (0 %)"
    ) and time.monotonic() < deadline:
        time.sleep(0.2)
    _slotline("cancel", job_id, url)
    return text


def main() -> None:
    print("| mistake | in the file | answer | s | processor s |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        log = folder / "serve.log"
        with LocalServer(directory=folder / "state", port=free_ports(1)[0], log=log) as server:
            for job in WRONG_JOBS:
                answer, took_s, processors_s = _answered(job, folder, server.url if job.asks else _NO_SERVER)
                assert job.answer.removeprefix("error: ") in answer, f"{job.mistake}: {answer}"
                told = "nothing is wrong: it is taken as it is" if job.taken else answer.replace("|", "\\|")
                cells = (job.mistake, f"`{job.after.strip()}`", told)
                print(f"| {' | '.join(cells)} | {took_s:.1f} | {processors_s:.1f} |", flush=True)


if __name__ == "__main__":
    main()
