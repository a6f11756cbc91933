"""A plan says what it depends on, and depends on nothing else."""

from importlib.metadata import version

import numpy as np
import ortools
import pytest

from service.scheduler.planner import make_plan
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.search import origin, priority_rules
from tests.service.scheduler.specs import measured


def test_a_plan_names_its_budget_seeds_and_versions():
    made = make_plan(load_spec(measured(3, 4, 1)), budget_s=0.5).made_with
    assert made.budget_s == 0.5
    assert made.versions["slotline"] == version("slotline")
    assert made.versions["ortools"] == ortools.__version__
    assert made.versions["numpy"] == np.__version__
    assert made.seeds == origin.SEEDS


def test_the_same_spec_and_budget_give_the_same_plan():
    spec = load_spec(measured(4, 8, 2, memory=2.4))
    assert make_plan(spec, budget_s=0.5) == make_plan(spec, budget_s=0.5)


@pytest.mark.slow
def test_the_seed_that_is_named_is_the_one_that_is_used(monkeypatch):
    seen = []
    genuine = np.random.default_rng
    monkeypatch.setattr(
        priority_rules.np.random, "default_rng", lambda seed: seen.append(seed) or genuine(seed)
    )
    make_plan(load_spec(measured(8, 12, 1, memory=2.0)), budget_s=1.0)
    assert origin.RULES_SEED in seen
    assert origin.FIRST_RUN_SEED in seen
