"""The learning rates of `optimizer.schedule: {warmup, decay}`, beside closed forms and torch's own schedules."""

from __future__ import annotations

import pytest
import torch

from worker.actor.optimizer import make_schedule, warmup_decay
from worker.contract.job import Factory

FACTORY = "worker.actor.optimizer:warmup_decay"


def rates(steps, **settings):
    """The learning rate of each of `steps`, of which the schedule knows."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = make_schedule(Factory(FACTORY, {"steps": steps, **settings}), optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_the_rate_rises_in_a_line_to_the_optimizers_own_and_stays():
    assert rates(6, warmup=3) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])
    assert rates(3) == [2.0, 2.0, 2.0]


def test_cosine_and_linear_decay_are_torchs_own_behind_the_warmup():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    expected = []
    for _ in range(8):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        cosine.step()
    assert rates(10, warmup=2, decay="cosine")[2:] == pytest.approx(expected)
    assert rates(10, warmup=2, decay="linear")[2:] == pytest.approx([2.0 * (1 - k / 8) for k in range(8)])


def test_a_schedule_goes_on_where_its_state_was_saved():
    def made():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return optimizer, warmup_decay(optimizer, 20, 4, "cosine")

    optimizer, schedule = made()
    for _ in range(7):
        optimizer.step()
        schedule.step()
    other, resumed = made()
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    for one, its in ((optimizer, schedule), (other, resumed)):
        one.step()
        its.step()
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 1.0


def test_another_decay_is_refused():
    with pytest.raises(Exception, match=r"decay is 'cos': write constant, linear or cosine"):
        rates(3, decay="cos")
