"""Models whose forward moves a teacher's weights: as buffers, the way that the refusal of parameters names."""

from __future__ import annotations

import pytest
import torch

from service.spec.job import JobSpec
from tests.worker.model.test_trace import MeanTeacher
from tests.worker.plain_job import PlainJob
from tests.worker.workers import Workers, mean_loss

STEPS = range(1, 4)


def mean_teacher() -> MeanTeacher:
    model = MeanTeacher(as_buffers=True)
    with torch.no_grad():
        for tensor in model.teacher.buffers():
            tensor.zero_()
    return model


class Rows:
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=drawn), torch.randn(4, generator=drawn)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_job_with_a_teacher_in_buffers_is_its_plain_loop(schedule):
    spec = JobSpec.model_validate(
        {
            "model": {"factory": f"{__name__}:mean_teacher"},
            "data": {"factory": f"{__name__}:Rows"},
            "loss": {"factory": "torch.nn.functional:mse_loss"},
            "optimizer": {"factory": "torch.optim:SGD", "args": {"lr": 0.1}},
            "training": {"steps": len(STEPS), "global_batch": 8, "microbatches": 4, "seed": 5},
            "pipeline": {"stages": 3, "schedule": schedule},
            "resources": {"meshes": 3, "device": "cpu"},
        }
    ).model_dump(mode="json")
    plain = PlainJob(spec).train(STEPS)
    with Workers(spec) as run:
        losses = [mean_loss(run.step(step)) for step in STEPS]
        state = {
            name: tensor
            for engine_state in run.call(lambda worker: worker.engine.state())
            for name, tensor in {**engine_state["parameters"], **engine_state["buffers"]}.items()
        }
    assert losses == pytest.approx(plain.losses, rel=1e-5)
    expected = plain.model.state_dict()
    assert {name for name in expected if name.startswith("teacher.")} <= set(state)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6, msg=name)
