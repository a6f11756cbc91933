"""State that forward keeps in Python is refused by name where a result comes to depend on it, also late; else it trains."""

import array
import queue
import random
import warnings

import pytest
import torch
from torch import nn

from tests.worker.model import stateful_models as stateful
from tests.worker.model.lying_models import WIDTH
from worker.checks import hazards
from worker.checks import trace as checks
from worker.checks.trace import check_evaluation_trace, check_trace
from worker.contract.profile import TraceError
from worker.model.eval_mode import trace_in_eval_mode
from worker.model.export import trace


def rows():
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))


def checked(model, loss=nn.MSELoss):
    torch.manual_seed(0)
    built = model()
    return check_trace(built, trace(built, (rows(),)), loss, torch.full((4, WIDTH), 0.5))


BUFFER = "which forward itself changes and a trace keeps as it was: keep it in a buffer"
TENSOR = "which forward itself changes.*register_buffer, and assign to that buffer or copy"
LATE = "which a trace keeps as it was: keep such state in a buffer"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (stateful.ObjectCounts, rf"the number 'state\.count' of ObjectCounts, {BUFFER}"),
        (lambda: stateful.ObjectCounts(stateful.SlottedCalls), r"the number 'state\.count' of ObjectCounts"),
        (stateful.NestedCounts, r"the number 'state\.tables\[0\]\['calls'\]' of module 'second'"),
        (stateful.ClosureCounts, rf"closure cell count of function .*scale, {BUFFER}"),
        (stateful.HookCounts, r"closure cell count\[0\] of function .*hook"),
        (stateful.DefaultCounts, r"default calls\[0\] of function DefaultCounts\.between"),
        (stateful.FunctionCounts, r"attribute calls of function counted"),
        (stateful.GlobalCounts, rf"global CALLS of module .*stateful_models, {BUFFER}"),
        (stateful.ClassCounts, r"attribute calls of class ClassCounts"),
        (stateful.IteratorCounts, rf"the iterator 'it' of IteratorCounts, {BUFFER}"),
        (stateful.ArrayCounts, rf"the array 'calls' of ArrayCounts, {BUFFER}"),
        (
            stateful.ListIterator,
            rf"in forward number \d+ the output differs.*'factors' of ListIterator, {LATE}",
        ),
        (
            stateful.CodeGenerator,
            rf"in forward number \d+ the output differs.*'factors' of CodeGenerator, {LATE}",
        ),
        (stateful.DequeCounts, rf"in forward number \d+ the output differs.*'last' of DequeCounts, {LATE}"),
        (
            stateful.RaisesLate,
            rf"in forward number \d+ RaisesLate raised StopIteration; .*'factors' .*{LATE}",
        ),
        (stateful.Memory, rf"the tensor 'mem' of Memory, {TENSOR}"),
        (stateful.MovingMean, rf"the tensor 'mem' of MovingMean, {TENSOR}"),
        (stateful.MovingMeanInPlace, rf"the tensor 'means\['x'\]' of MovingMeanInPlace, {TENSOR}"),
        (stateful.FirstMean, rf"the tensor 'cache\['mean'\]' of FirstMean, {TENSOR}"),
        (stateful.DrawsAhead, r"the number '(rows|taken)' of module 'drop', which forward itself changes"),
        (stateful.RareRandom, "random numbers of Python or numpy.*draw them with torch"),
        (stateful.OwnRandom, "the generator 'random' of OwnRandom.*draw them with torch"),
        (stateful.OwnNumpyRandom, "the generator 'random' of OwnNumpyRandom.*draw them with torch"),
        (
            stateful.LateBackward,
            "gradient of 'first.*_LateBackward.*custom_op.*attribute calls of class _LateBackward",
        ),
        (
            stateful.VeryLateBackward,
            "gradient of 'first.*_LastBackward.*custom_op.*attribute calls of class _LastBackward, which backward itself",
        ),
        (stateful.ByteCounts, rf"the array 'calls' of ByteCounts, {BUFFER}"),
        (
            lambda: stateful.ByteCounts(lambda: array.array("l", [0])),
            rf"the array 'calls' of ByteCounts, {BUFFER}",
        ),
        (
            stateful.QueueCounts,
            rf"in forward number \d+ the output differs.*'last\.\w+' of QueueCounts.*{LATE}",
        ),
        (
            lambda: stateful.QueueCounts(queue.SimpleQueue),
            rf"in forward number \d+ the output differs.*'last' of QueueCounts, {LATE}",
        ),
    ],
)
def test_state_that_a_result_comes_to_depend_on_is_refused_by_name(model, message):
    with pytest.raises(TraceError, match=message):
        checked(model)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (stateful.LogsCalls, ["'calls' of LogsCalls", "and 2 more"]),
        (stateful.KeepsMap, ["'attention_map' of KeepsMap"]),
        (stateful.KeepsStatistics, ["'kept' of KeepsStatistics"]),
    ],
)
def test_what_forward_keeps_for_looking_at_trains_with_a_note(model, names):
    (note,) = checked(model)
    assert all(name in note for name in names) and "no change that was tried changed the output" in note


def test_a_backward_that_counts_for_looking_at_trains_with_a_note():
    notes = checked(stateful.CountsBackwards)
    assert any(
        note.startswith("backward changes attribute calls of class _CountingBackward")
        and "changed a gradient" in note
        for note in notes
    )


def test_a_backward_that_is_right_on_the_first_microbatch_alone_is_refused_by_a_further_one():
    torch.manual_seed(0)
    built = stateful.ClipsLargeInputs()
    traced, target = trace(built, (rows(),)), torch.full((4, WIDTH), 0.5)
    assert check_trace(built, traced, nn.MSELoss, target)
    with pytest.raises(TraceError, match=r"in forward number \d+ the gradient of .*_Clipped"):
        check_trace(built, traced, nn.MSELoss, target, further=[((100 * rows(),), target)])


def test_a_graph_that_computes_something_else_than_the_model_in_eval_mode_is_refused():
    torch.manual_seed(0)
    built = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)
    )
    traced = trace_in_eval_mode(built, (rows(),), autocast=None, transfers="auto")
    before = {name: value.clone() for name, value in built.state_dict().items()}
    target = torch.full((4, WIDTH), 0.5)
    check_evaluation_trace(built, traced, nn.MSELoss, target)
    assert all(module.training for module in built.modules())
    torch.testing.assert_close(built.state_dict(), before, rtol=0, atol=0)
    with pytest.raises(TraceError, match=r"^in eval mode, which `evaluation` needs: the output differs"):
        check_evaluation_trace(built, trace(built, (rows(),)), nn.MSELoss, target)


@pytest.mark.parametrize(
    "model", [stateful.RotaryCache, stateful.RotaryDict, stateful.RotaryNew, stateful.RotaryMemo]
)
def test_a_table_that_the_first_forward_computes_trains_and_no_fake_tensor_stays_in_it(model):
    stateful.cosines.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checked(model) == []
    assert stateful.cosines.cache_info().currsize == 0


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_torch_computes_before_each_forward_are_no_state(norm):
    def normed():
        model = stateful.Plain()
        norm(model.first)
        return model

    assert checked(normed) == []


@pytest.mark.parametrize("model", [stateful.LogsCalls, stateful.KeepsMap, stateful.RotaryNew])
def test_the_python_state_is_afterwards_what_it_was(model):
    torch.manual_seed(0)
    built = model()
    check_trace(built, trace(built, (rows(),)), nn.MSELoss, torch.zeros(4, WIDTH))
    if model is stateful.LogsCalls:
        kept = built.calls, built.state.count, next(built.it), built.history, built.sums.tolist()
        assert kept == (0, 0, 0, [], [0.0, 0.0, 0.0])
    elif model is stateful.KeepsMap:
        assert built.attention_map is None
    else:
        assert not hasattr(built, "cos")


@pytest.mark.parametrize("seed", range(3))
def test_a_generator_with_extremes_draws_what_is_rare(seed):
    state = random.getstate()
    try:
        hazards._seed_with_extremes(random, seed)
        drawn = [random.random() for _ in range(64)]
        assert min(drawn) < 1e-8 and max(drawn) > 1 - 1e-8
        assert any(0.1 < one < 0.9 for one in drawn)
    finally:
        random.setstate(state)


def test_rounds_that_take_too_long_are_fewer_and_said(monkeypatch):
    monkeypatch.setattr(checks, "ROUNDS_BUDGET_S", 0.0)
    (note,) = checked(stateful.Plain)
    assert f"in {checks.LEAST_ROUNDS} rounds in place of {checks.ROUNDS}" in note


def test_a_loss_that_changes_its_target_is_blamed_and_not_forward():
    with pytest.raises(TraceError, match=r"the loss changes its target in place.*target\.clone\(\)"):
        checked(stateful.Plain, stateful.TargetChanged)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (stateful.OwnGenerator, "the torch.Generator 'noise' of OwnGenerator.*training.seed"),
        (stateful.WritesBufferData, r"stateful_models\.py:\d+: it writes to buffer 'mean' through \.data"),
        (
            stateful.ClampsWeightData,
            r"stateful_models\.py:\d+: it writes to parameter 'first\.weight' through \.data",
        ),
        (stateful.TakesGradients, r"stateful_models\.py:\d+: it takes gradients with torch\.autograd\.grad"),
    ],
)
def test_what_cannot_be_traced_is_named_with_line_and_way_out(model, message):
    with pytest.raises(TraceError, match=message):
        checked(model)
