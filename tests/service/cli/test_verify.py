"""`slotline verify` on job files, with code of the user's own, in processes as a user's."""

from __future__ import annotations

import json
import textwrap

import pytest
import yaml
from typer.testing import CliRunner

from service.cli.local.verify import proof_text, verify_job
from service.cli.main import app

OWN = textwrap.dedent(
    """
    import ctypes

    import torch
    from torch import nn


    class Points:
        def __len__(self):
            return 16

        def __getitem__(self, index):
            return torch.arange(6.0) / (index + 1), torch.ones(6)


    class _Doubled(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x * 1.0

        @staticmethod
        def backward(context, gradient):
            return gradient * 2


    class Doubles(nn.Module):
        '''Its own backward is lost when it is traced.'''

        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            return self.third(torch.tanh(self.second(_Doubled.apply(self.first(x)))))


    def layers():
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))


    class Dies(nn.MSELoss):
        left = 80  # the checks before the first step call a loss some 45 times

        def forward(self, output, target):
            Dies.left -= 1
            if Dies.left < 0:
                ctypes.string_at(0)
            return super().forward(output, target)
    """
)


@pytest.fixture
def job_file(tmp_path, monkeypatch):
    """Writes job.yaml, and own.py in a folder beside it."""
    monkeypatch.setenv("SLOTLINE_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "own.py").write_text(OWN)

    def write(model, **changes):
        job = {
            "name": "own",
            "model": {"factory": f"own:{model}"},
            "data": {"factory": "own:Points"},
            "loss": {"factory": "torch.nn:MSELoss"},
            "optimizer": {"factory": "torch.optim:AdamW", "args": {"lr": 1e-2}},
            "training": {"steps": 5, "global_batch": 8, "microbatches": 2, "clip_grad_norm": 1.0}
            | changes.pop("training", {}),
            "pipeline": {"stages": 2, "schedule": "1f1b"},
            "resources": {"meshes": 2, "device": "auto"},
            "code": {"working_dir": "src"},
            **changes,
        }
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(job))
        return file

    return write


@pytest.mark.slow
def test_a_true_pipeline_ends_with_0_and_says_what_was_compared_and_what_not(job_file):
    file = job_file("layers")
    result = CliRunner().invoke(app, ["verify", str(file), "--steps", "2", "--budget-s", "0.2", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["equal"], found["steps"], found["stages"], found["meshes"]) == (True, 2, 2, 2)
    counts = {one["what"]: one["count"] for one in found["compared"]}
    assert counts["losses"] == 4 and counts["gradients"] == 12 == counts["parameters after the step"]
    assert counts["transfers"] == 8, "each of two microbatches there and back, in two steps"
    assert any("CUDA" in text for text in found["not_covered"])
    text = proof_text(found)
    assert text.startswith("equal      2 steps") and "not covered: " in text


@pytest.mark.slow
def test_a_pipeline_that_trains_something_else_ends_with_1_and_names_what_differs(job_file):
    file = job_file("Doubles", training={"check_trace": False})
    result = CliRunner().invoke(app, ["verify", str(file), "--steps", "1", "--budget-s", "0.2"])
    assert result.exit_code == 1
    assert result.stdout.startswith("DIFFERENT  step 1: the gradient of 'first.bias' of stage 0 on m0")
    assert "0.5 times the plain model's; made by 0B0 on m0, 0B1 on m0" in result.stdout


@pytest.mark.slow
def test_in_python_what_cannot_be_run_raises_with_the_way_out(job_file):
    file = job_file("layers")
    job = yaml.safe_load(file.read_text())
    with pytest.raises(ValueError, match="raise --limit-s"):
        verify_job(job, file, steps=1, budget_s=0.2, limit_s=1.0)
    with pytest.raises(ValueError, match="--resume '/nowhere/step-1' is no folder"):
        verify_job(job, file, resume="/nowhere/step-1")
    with pytest.raises(ValueError, match=r"own.*nothing_there"):
        verify_job({**job, "model": {"factory": "own:nothing_there"}}, file, steps=1, budget_s=0.2)
    with pytest.raises(ValueError, match=r"native code \(Segmentation fault\) in (1F|step)"):
        verify_job({**job, "loss": {"factory": "own:Dies"}}, file, steps=50, budget_s=0.2)
