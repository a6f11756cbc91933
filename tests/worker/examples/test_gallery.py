"""The page of the gallery and of the ways over: its job files are jobs, and the one that no template has trains."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from service.cli.job_file import StrictYamlLoader
from service.cli.local.check import Template
from service.spec.job import JobSpec, SubmittedJob
from tests.worker.workers import Workers

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "worker" / "examples" / "README.md").read_text()
SECTIONS = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])
JOBS = {
    title: yaml.load(job, StrictYamlLoader)
    for title, text in SECTIONS.items()
    for job in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
}


def test_the_page_has_a_job_for_every_way_and_names_every_template():
    ways = ["Gallery", "From a plain loop", "From Trainer", "From accelerate", "From torchtitan"]
    assert list(JOBS) == ways and PAGE.count("```yaml") == len(ways)
    for template in Template:
        assert PAGE.count(f"`slotline init {template.value}`") == 1
    assert "(worker/examples/README.md)" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("title", JOBS)
def test_a_job_of_the_page_is_taken_as_a_server_takes_it(title: str):
    code = {"working_dir": None} if "code" in JOBS[title] else {}
    job = SubmittedJob.model_validate({**JOBS[title], "code": code})
    workers = {"From accelerate": (2, 2, 1), "From torchtitan": (4, 4, 2), "From a plain loop": (2, 1, 1)}
    meshes, of_each, tensor = workers.get(title, (4, 1, 1))
    resources = job.resources
    assert (resources.meshes, resources.workers_per_mesh, resources.tensor) == (meshes, of_each, tensor)


@pytest.mark.slow
def test_the_gpt_learns_from_token_files(tmp_path: Path):
    rng = np.random.default_rng(0)
    (np.cumsum(rng.integers(1, 4, 20_000)) % 97).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    spec = JOBS["Gallery"]
    job = {
        **spec,
        "model": {**spec["model"], "args": {**spec["model"]["args"], "layers": 4, "width": 32}},
        "data": {**spec["data"], "args": {**spec["data"]["args"], "path": str(tmp_path)}},
        "training": {**spec["training"], "steps": 12, "global_batch": 8, "microbatches": 4},
    }
    with Workers(JobSpec.model_validate(job).model_dump(mode="json")) as workers:
        losses = workers.losses(range(1, 13))
    assert losses[0] == pytest.approx(np.log(50_257), rel=0.05)
    assert losses[-1] < 0.95 * losses[0], losses
