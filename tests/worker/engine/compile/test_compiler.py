"""A compiled stage makes what the traced one makes, compiles nothing later, and what goes wrong leaves it as traced."""

from __future__ import annotations

import logging
import threading
import time
from itertools import chain

import pytest
import torch
from torch import nn

from tests.worker.engine.compile.staged import TOKENS, gpt_stage, made
from worker.engine import compile as room
from worker.engine.autograd import backward, backward_input
from worker.engine.compile import (
    OverdueError,
    StageCompiler,
    missing_compiler,
    time_limit,
)
from worker.engine.forward import run_forward, uncompiled
from worker.model.export import trace
from worker.model.rng import RandomState, reseed_at_random_ops


def a_compiler(limit_s=3600.0):
    return StageCompiler(device="cpu", autocast=None, limit_s=limit_s)


def forward(stage, *, training=True):
    return run_forward(stage, [TOKENS], device_type="cpu", training=training, autocast_dtype=None).outputs


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(missing_compiler("cpu") is not None, reason="no C++ compiler")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_by_inductor_a_stage_has_the_values_gradients_and_masks_of_the_traced_one(dropout):
    stage, state = gpt_stage(dropout=dropout)
    expected = [made(stage, state, step=step) for step in (1, 2)]
    one = a_compiler()
    assert one.compile("stage s0", stage, [TOKENS]), one.notes
    before = stage.compiled.graphs
    found = [made(stage, state, step=step) for step in (1, 2)]
    for other, same in zip(chain(*found), chain(*expected), strict=True):
        torch.testing.assert_close(other, same, rtol=1e-4, atol=1e-5)
    assert one.notes == []
    assert stage.compiled.graphs == before


@pytest.mark.slow
@pytest.mark.usefixtures("no_generated_code")
def test_a_stage_with_dropout_has_the_values_gradients_and_masks_of_the_traced_one():
    stage, state = gpt_stage(dropout=0.2)
    expected = [made(stage, state, step=step) for step in (1, 2)]
    assert a_compiler().compile("stage s0", stage, [TOKENS])
    assert stage.compiled.graphs > 3
    found = [made(stage, state, step=step) for step in (1, 2)]
    for other, same in zip(chain(*found), chain(*expected), strict=True):
        torch.testing.assert_close(other, same)
    assert not torch.equal(found[0][0], found[1][0])


@pytest.mark.usefixtures("no_generated_code")
def test_steps_on_other_threads_with_other_weights_compile_nothing(caplog):
    stage, state = gpt_stage()
    assert a_compiler().compile("stage s0", stage, [TOKENS], (False, True))
    before = stage.compiled.graphs
    assert before == 2  # without gradients, as a recomputed stage runs first, and with them

    def steps():
        for step in (1, 2):
            forward(stage, training=False)
            made(stage, state, step=step)
            with torch.no_grad():
                for parameter in stage.parameters():
                    parameter.sub_(0.1 * parameter.grad)

    for thread in [threading.Thread(target=steps) for _ in range(2)]:
        thread.start()
        thread.join()
    assert stage.compiled.graphs == before
    assert "runs as traced" not in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("no_generated_code")
def test_what_it_was_not_compiled_for_runs_as_traced_and_is_told(caplog):
    stage, _ = gpt_stage()
    assert a_compiler().compile("stage s0", stage, [TOKENS])
    with uncompiled(stage):
        (expected,) = forward(stage, training=False)
    with caplog.at_level(logging.WARNING):
        (found,) = forward(stage, training=False)
    assert torch.equal(found, expected)
    assert "stage s0 runs as traced from here on: it got other arguments" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("no_generated_code")
def test_a_backward_in_two_parts_makes_the_gradients_of_the_whole_one():
    """What is compiled is several nodes between draws."""
    stage, state = gpt_stage(dropout=0.2)
    assert a_compiler().compile("stage s0", stage, [TOKENS])
    parameters = list(stage.parameters())

    def run():
        state.begin(1, 0)
        x = torch.ones((), requires_grad=True)
        outputs = run_forward(
            _Scaled(stage, x), [TOKENS], device_type="cpu", training=True, autocast_dtype=None
        ).outputs
        return x, outputs, [torch.ones_like(one) for one in outputs]

    x, outputs, gradients = run()
    (of_x,) = backward(outputs, gradients, [x])
    expected = [p.grad for p in parameters]
    stage.zero_grad()
    x, outputs, gradients = run()
    (found,), weights = backward_input(outputs, gradients, [x])
    torch.testing.assert_close(found, of_x)
    weights.run()
    for p, one in zip(parameters, expected, strict=True):
        torch.testing.assert_close(p.grad, one)


class _Scaled:
    """The stage with an input that takes a gradient."""

    def __init__(self, stage, x):
        self._stage, self._x = stage, x

    def __call__(self, tokens):
        (output,) = self._stage(tokens)
        return (output * self._x,)


def broken(graph, arguments):
    raise NotImplementedError("no such operator here\nand a page of more")


def slow(graph, arguments):
    while True:
        time.sleep(0.01)


def wrong(graph, arguments):
    """Makes twice of everything."""
    return lambda *given: tuple(one * 2 for one in graph.forward(*given))


def of_another_type(graph, arguments):
    """The same values, to the bit."""
    return lambda *given: tuple(one.double() for one in graph.forward(*given))


def of_another_shape(graph, arguments):
    """The same values in another shape, which they could be compared with."""
    return lambda *given: tuple(one.unsqueeze(0) for one in graph.forward(*given))


SHAPE = "[2, 256, 8]"


@pytest.mark.parametrize(
    ("backend", "limit_s", "why"),
    [
        (broken, 3600.0, "NotImplementedError: no such operator here"),
        (slow, 1.0, "compiling took longer than 1 s for all stages"),
        (
            wrong,
            3600.0,
            "compiled, output 'output' of shape [2, 256, 8] differs by 1 of its size (at most 0.0001",
        ),
        (
            of_another_type,
            3600.0,
            f"output 'output' is {SHAPE} torch.float64, as traced {SHAPE} torch.float32",
        ),
        (
            of_another_shape,
            3600.0,
            f"output 'output' is [1, 2, 256, 8] torch.float32, as traced {SHAPE} torch",
        ),
    ],
)
def test_what_cannot_be_compiled_runs_as_traced_and_a_note_says_which_and_why(
    backend, limit_s, why, monkeypatch
):
    monkeypatch.setattr(room.torch._dynamo, "lookup_backend", lambda name: backend)
    monkeypatch.setattr(room, "missing_compiler", lambda device: None)
    stage, state = gpt_stage()
    expected = made(stage, state)
    one = a_compiler(limit_s)
    assert not one.compile("stage s3", stage, [TOKENS])
    (note,) = one.notes
    assert note.startswith("training.compile: stage s3 runs as traced: ")
    assert why in note
    assert all(torch.equal(a, b) for a, b in zip(made(stage, state), expected, strict=True))
    if backend is slow:
        other, _ = gpt_stage()
        assert not one.compile("stage s4", other, [TOKENS])
        assert "stage s4 runs as traced: the time for compiling was over before it" in one.notes[1]


def test_without_a_compiler_a_note_names_it_and_nothing_is_tried(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    stage, _ = gpt_stage()
    one = a_compiler()
    assert not one.compile("stage s0", stage, [TOKENS])
    assert stage.compiled is None
    (note,) = one.notes
    assert "everything runs as traced: no C++ compiler was found (looked for g++)" in note
    assert "CXX" in note


def test_where_torch_compile_is_switched_off_that_is_told(monkeypatch):
    monkeypatch.setattr(room, "missing_compiler", lambda device: None)
    monkeypatch.setattr(room.torch, "compile", lambda body, **_: body)
    stage, _ = gpt_stage()
    one = a_compiler()
    assert not one.compile("stage s0", stage, [TOKENS])
    assert "unset TORCH_COMPILE_DISABLE" in one.notes[0]


@pytest.mark.usefixtures("no_generated_code")
def test_compiling_leaves_no_gradient_and_no_buffer_changed_and_moves_no_generator():
    torch.manual_seed(4)
    before = torch.get_rng_state()
    traced = trace(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), (torch.randn(8, 3),))
    stage = traced.builder([0] * len(traced.layers)).stage(0)
    reseed_at_random_ops(stage, RandomState(7, 0, torch.device("cpu")))
    torch.set_rng_state(before)
    buffers = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    assert a_compiler().compile("stage s0", stage, [torch.ones(8, 3)])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in stage.parameters())
    assert stage.updated_buffers
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in stage.named_buffers())


@pytest.mark.slow
def test_a_time_limit_ends_what_looks_at_no_clock_and_nothing_else():
    with pytest.raises(OverdueError), time_limit(0.2):
        while True:
            pass
    with pytest.raises(OverdueError), time_limit(0.2):  # also where somebody keeps it
        try:
            while True:
                pass
        except BaseException:
            pass
    with time_limit(30):
        pass
    time.sleep(0.05)
