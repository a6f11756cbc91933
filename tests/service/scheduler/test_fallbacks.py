"""What goes wrong inside the scheduler costs a plan some quality, and says so; it never costs the plan."""

import json
import logging
from dataclasses import replace

import pytest

from service.orchestrator.planning import pool
from service.scheduler import planner
from service.scheduler.auto import auto
from service.scheduler.planner import find_timeline, make_plan
from service.scheduler.problem import defects
from service.scheduler.problem.defects import SchedulerDefect
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.programs.check_programs import check_programs, check_slots
from service.scheduler.programs.codegen import compile_programs
from service.scheduler.programs.decode import PlanError
from tests.service.scheduler.checker import check_plan, run_programs
from tests.service.scheduler.specs import measured

DATA = measured(4, 8, 17)


def refuse(monkeypatch, times):
    """Have the proof of the first `times` plans fail."""
    calls = []

    def failing(spec, programs):
        calls.append(programs)
        if len(calls) <= times:
            raise PlanError("planted")
        return check_programs(spec, programs)

    monkeypatch.setattr(planner, "check_programs", failing)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_plan_that_does_not_pass_is_replaced_by_the_next_best_that_does(monkeypatch, times):
    monkeypatch.setattr(defects, "strict", False)
    refuse(monkeypatch, times)
    plan = make_plan(load_spec(DATA), budget_s=0.3)
    assert [note for note in plan.notes if "PlanError: planted" in note] == plan.notes and len(
        plan.notes
    ) == times
    written = json.loads(plan.model_dump_json())
    check_plan(DATA, written)
    run_programs(DATA, written["programs"], seed=2)


def test_a_plan_of_which_nothing_passes_is_refused(monkeypatch):
    monkeypatch.setattr(defects, "strict", False)
    refuse(monkeypatch, 100)
    with pytest.raises(PlanError, match="planted"):
        make_plan(load_spec(DATA), budget_s=0.3)


def test_where_defects_are_errors_a_plan_that_does_not_pass_is_one(monkeypatch):
    refuse(monkeypatch, 1)
    with pytest.raises(SchedulerDefect, match="planted"):
        make_plan(load_spec(DATA), budget_s=0.3)


def test_without_any_search_the_best_named_schedule_is_the_plan(monkeypatch):
    def broken(*arguments, **options):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(defects, "strict", False)
    monkeypatch.setattr(auto, "search", broken)
    plan = make_plan(load_spec(DATA))
    assert plan.notes[0] == "the search failed with ZeroDivisionError: planted"
    assert not plan.proven_optimal
    named = [
        make_plan(load_spec({**DATA, "schedule": name})) for name in ("gpipe", "1f1b", "eager-1f1b", "zb-h1")
    ]
    assert plan.makespan_s <= max(other.makespan_s for other in named)
    check_plan(DATA, json.loads(plan.model_dump_json()))


def test_a_slot_that_the_programs_start_at_another_time_is_named():
    spec = load_spec(DATA)
    timeline = find_timeline(spec, budget_s=0.0)
    played = check_programs(spec, compile_programs(timeline))
    check_slots(timeline, played)
    task = timeline.problem.task(2, 0, 3)
    start = timeline.start.copy()
    start[task] -= 1e-6 * timeline.makespan
    with pytest.raises(PlanError, match=r"mesh 'm2': F of stage 2, microbatch 3, is planned to start at"):
        check_slots(replace(timeline, start=start), played)


def test_the_pool_logs_what_went_wrong_with_the_spec_that_shows_it(monkeypatch, caplog):
    monkeypatch.setattr(defects, "strict", False)
    refuse(monkeypatch, 1)
    with caplog.at_level(logging.ERROR, logger=pool.__name__):
        pool._plan_spec(lambda: False, json.dumps(DATA), 0.2, "json")
    (record,) = caplog.records
    told, _, spec = record.getMessage().partition("; the spec: ")
    assert "planted" in told
    assert load_spec(spec) == load_spec(DATA)
