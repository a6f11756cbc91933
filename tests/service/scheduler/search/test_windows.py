"""Parts of a plan planned anew: the model is that of the window, and nothing is taken that a replay does not bear out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from service.scheduler.problem.memory import keeps_activation_limits, keeps_memory_limits
from service.scheduler.problem.problem import build_problem
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.search import exact, large_neighbourhoods, tabu
from service.scheduler.search.search import search
from service.scheduler.search.windows import WindowCutter, WindowModel
from tests.service.scheduler.specs import chain, measured, random_specs


def v_placed(microbatches):
    """V placement on eight meshes with room for sixteen activations: no solver takes it whole."""
    placed = [min(s, 15 - s) for s in range(16)]
    data = chain(
        16, microbatches, meshes=placed, schedule="auto", split_backward=True, forward=5.0, backward=10.0
    )
    for mesh in data["meshes"]:
        mesh["activation_limit_bytes"] = 32
    return build_problem(load_spec(data))


def model_of(paths, first, last):
    problem = paths.timeline.problem
    window = paths.window(first, last)
    scale, lengths = exact.integer_durations(problem)
    return WindowModel(window, np.zeros(len(window.tasks), dtype=bool), lengths, scale, 1e-7)


def solved(problem, timeline, **options):
    return large_neighbourhoods.large_neighbourhood_search(
        problem,
        timeline,
        lower_bound_s=0.0,
        deterministic_limit=options.get("effort", 0.1),
        seed=1,
        stop=lambda: False,
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=random_specs())
def test_every_window_holds_a_longest_path_and_its_own_order_gives_the_same_timeline(data):
    problem = build_problem(load_spec(data))
    found = search(problem, [], budget_s=0)
    if found is None:
        return
    paths, count = WindowCutter(found.timeline), len(found.timeline.sequence)
    for first in range(0, count, max(1, count // 4)):
        window = paths.window(first, min(count, first + max(1, count // 3)))
        assert window.makespan <= found.timeline.makespan * (1 + 1e-9)
        again = window.replay(window.tasks, found.timeline.start[window.tasks])
        assert again.makespan == pytest.approx(found.timeline.makespan, rel=1e-9)
    # no task of the whole but lies on a path at most as long, and one on a path just as long
    assert paths.window(0, count).makespan == pytest.approx(found.timeline.makespan, rel=1e-9)


def test_the_model_of_a_part_has_the_size_of_the_part_whatever_lies_around_it():
    sizes = {}
    for microbatches in (32, 128):
        problem = v_placed(microbatches)
        paths = WindowCutter(search(problem, [], budget_s=0).timeline)
        middle = len(paths.timeline.sequence) // 2
        for tasks in (150, 300, 600):
            sizes[microbatches, tasks] = model_of(paths, middle, middle + tasks).variables
            assert sizes[microbatches, tasks] <= 3 * tasks + 100
    assert all(sizes[128, tasks] <= sizes[32, tasks] + 100 for tasks in (150, 300, 600))


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=random_specs())
def test_a_window_over_everything_finds_what_the_model_of_the_whole_proves(data):
    for mesh in data["meshes"]:
        mesh.pop("receive_buffer_limit", None)
    data["schedule"], data["microbatches"] = "auto", min(data["microbatches"], 3)
    problem = build_problem(load_spec(data))
    found = search(problem, [], budget_s=0)
    if found is None:
        return
    timeline = found.timeline
    proven = exact.solve(problem, timeline, lower_bound_s=found.lower_bound_s, deterministic_limit=2.0)
    if not proven.finished:
        return
    scale, lengths = exact.integer_durations(problem)
    while True:
        window = WindowCutter(timeline).window(0, len(timeline.sequence))
        free = np.zeros(len(window.tasks), dtype=bool)
        better, _ = exact.rearrange_window(window, free, lengths, scale, deterministic_limit=2.0)
        if better is None or better.makespan >= timeline.makespan:
            break
        assert keeps_activation_limits(problem, better.lanes)
        timeline = better
    best = proven.timeline.makespan if proven.timeline is not None else found.timeline.makespan
    assert timeline.makespan == pytest.approx(min(best, found.timeline.makespan), rel=1e-6)


@pytest.mark.slow
def test_parts_of_a_v_of_many_microbatches_are_solved_and_shorten_it(monkeypatch):
    problem = v_placed(128)
    first = search(problem, [], budget_s=0).timeline
    solve, parts = exact.rearrange_window, []

    def counted(window, fixed, *arguments, **options):
        parts.append(len(window.tasks))
        return solve(window, fixed, *arguments, **options)

    monkeypatch.setattr(large_neighbourhoods.exact, "rearrange_window", counted)
    found = solved(problem, first, effort=0.3)
    assert parts and max(parts) <= 2_500 < len(first.sequence)
    assert found.makespan < first.makespan
    assert keeps_activation_limits(problem, found.lanes)


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["activation_limit_bytes", "memory_bytes"])
def test_an_answer_of_the_solver_that_a_replay_does_not_bear_out_is_not_taken(monkeypatch, limit):
    if limit == "memory_bytes":
        problem = build_problem(load_spec(measured(8, 32, 40, memory=4.8)), split=True)
    else:
        problem = v_placed(32)
    first = search(problem, [], budget_s=0).timeline
    # a model that forgets memory finds shorter orders that do not fit
    monkeypatch.setattr(WindowModel, "_add_memory", lambda *arguments: None)
    found = solved(problem, first)
    assert found.makespan <= first.makespan
    assert keeps_activation_limits(problem, found.lanes) and keeps_memory_limits(found)


def test_tabu_search_of_many_tasks_works_on_windows_of_them(monkeypatch):
    skips = ((0, 7), (1, 6), (2, 5))
    data = chain(
        8, 24, skips=skips, transfer=1.2, contention="half-duplex", schedule="auto", split_backward=True
    )
    problem = build_problem(load_spec(data))
    first = search(problem, [], budget_s=0).timeline
    monkeypatch.setattr(tabu, "_LARGEST", 500)
    monkeypatch.setattr(tabu, "_WINDOW", 400)
    found = tabu.tabu_search(problem, first, goal_s=0.0, iterations=5_000, seed=1, stop=lambda: False)
    assert found.makespan < first.makespan
    assert keeps_activation_limits(problem, found.lanes)
    assert np.array_equal(np.sort(found.sequence), np.sort(first.sequence))
