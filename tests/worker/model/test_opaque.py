"""Modules that no trace takes run as they are inside their stages, and train as their plain loop does."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from service.spec.job import JobSpec
from tests.polling import until
from tests.tiers import some_by_day
from tests.worker.model import opaque_models
from tests.worker.model.opaque_models import CLASSES, KINDS, WIDTH, Branch, build
from tests.worker.model.running import buffers, gradients, step
from tests.worker.plain_job import PlainJob
from tests.worker.verify.proving import proof_of
from tests.worker.workers import PreparedMeasurements, Workers
from worker.checkpoint import format as checkpoint_format
from worker.checks.trace import check_trace
from worker.contract.job import Job
from worker.contract.profile import LayerProfile, TraceError
from worker.engine import compile as engine_compile
from worker.model.export import trace
from worker.model.opaque.call import opaque_calls
from worker.model.rng import RandomState, reseed_at_random_ops
from worker.model.serialization import deserialize_model, load_values, parameter_values, serialize_model
from worker.tasks.profile import LocalMeasurements
from worker.verify.local_gang import prepare_workers

STEPS = range(1, 4)
DETERMINISTIC = [kind for kind in KINDS if kind != "random"]


def made(kind, layers=2):
    torch.manual_seed(0)
    return build(kind, layers), torch.randn(4, WIDTH)


@some_by_day("kind", KINDS, by_day=5)
def test_a_module_that_cannot_be_traced_is_one_node_and_equals_itself(kind):
    model, x = made(kind)
    traced = trace(model, (x,))
    innermost = ["1.codebook", "3.codebook"] if kind == "codebook" else ["1", "3"]
    assert list(traced.opaque) == innermost
    assert traced.layers == [str(index) for index in range(len(model))]
    notes = check_trace(model, traced, lambda: functional.cross_entropy, torch.randint(CLASSES, (4,)))
    assert len(notes) == 1
    assert "runs as it is, eagerly" in notes[0]


@some_by_day("kind", DETERMINISTIC, by_day=4)
def test_its_stages_have_the_gradients_and_buffers_of_the_model(kind):
    model, x = made(kind)
    plain = copy.deepcopy(model)
    graph = trace(model, (x,)).cut(["2", "4"])
    output = step(graph, (x.clone(),))
    expected = plain(x.clone())
    (expected**2).sum().backward()
    torch.testing.assert_close(output, expected)
    of_stages = gradients(graph)
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(of_stages[name], parameter.grad, msg=name)
    for name, value in buffers(graph).items():
        torch.testing.assert_close(value, plain.state_dict()[name], msg=name)
    assert {name.partition(".")[0] for name, one in model.named_parameters() if one.grad is not None} == set()


def test_a_graph_travels_with_its_modules_and_without_their_parameters():
    model, x = made("codebook", layers=1)
    model.load_state_dict({k: v + 1 if v.is_floating_point() else v for k, v in model.state_dict().items()})
    traced = trace(model, (x,))
    sent = serialize_model(traced)
    arrived = deserialize_model(sent)
    (call,) = opaque_calls(arrived.placed.module)
    assert all(value.is_meta for value in [*call._held[0].parameters(), *call._held[0].buffers()])
    names = arrived.parameters([], [0])
    load_values(arrived, parameter_values(traced, names))
    assert torch.equal(step(arrived.cut([]), (x,)), step(traced.cut([]), (x,)))
    assert arrived.opaque == traced.opaque


def test_stages_have_copies_of_a_module_with_the_python_state_of_their_own():
    model, x = made("branch", layers=1)
    model[1].seen = []
    model[1].register_forward_pre_hook(lambda module, _: module.seen.append(1))
    traced = trace(model, (x,))
    first, second = traced.cut([]), traced.cut([])
    step(first, (x,))
    (one,), (other,) = (opaque_calls(graph.stages[0]) for graph in (first, second))
    assert (one._held[0].seen, other._held[0].seen, model[1].seen) == ([1], [], [])


class Watched(nn.Module):
    """A net with a buffer, which another module in it knows too and whose calls decide what it does."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.watcher = nn.Module()
        self.watcher.net = self.net

    def forward(self, x):
        statistics = self.watcher.net[1]
        if statistics.num_batches_tracked > 2:
            statistics.num_batches_tracked.zero_()
        return self.net(x)


def test_a_module_that_stands_at_two_paths_inside_one_keeps_its_tensors():
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Watched(), nn.Linear(WIDTH, 1)), torch.randn(4, WIDTH)
    plain = copy.deepcopy(model)
    traced = trace(model, (x,))
    assert list(traced.opaque) == ["1"]
    (stage,) = traced.cut([]).stages
    for _ in range(5):
        torch.testing.assert_close(stage(x)[0], plain(x))
    assert int(plain[1].net[1].num_batches_tracked) == 2
    assert int(dict(stage.named_buffers())[_local_name(stage, "1.net.1.num_batches_tracked")]) == 2


def _local_name(stage, original):
    return next(name for name, known in stage.original_names.items() if known == original)


def test_a_module_called_twice_has_one_copy_in_a_stage():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.shared, self.last = nn.Linear(WIDTH, WIDTH), Branch(), nn.Linear(WIDTH, 1)

        def forward(self, x):
            return self.last(self.shared(self.first(self.shared(x))))

    model, x = Twice(), torch.randn(4, WIDTH)
    traced = trace(model, (x,))
    assert traced.layers == ["shared", "first", "shared@1", "last"]
    one, other = opaque_calls(traced.cut([]).stages[0])
    assert one._held[0] is other._held[0]
    check_trace(model, traced, lambda: functional.mse_loss, torch.randn(4, 1))


class Inner(nn.Module):
    """Something done to the result of a layer, in a module with others around it."""

    def __init__(self, do):
        super().__init__()
        self.layer, self.do = nn.Linear(WIDTH, WIDTH), do

    def forward(self, x):
        return self.do(self, self.layer(x))


def selecting(module, x):
    return x[x.sum(-1) > x.sum(-1).median()]


def changing(module, x):
    with torch.no_grad():
        module.layer.weight.mul_(0.9)
    return x if x.sum() > 0 else 2 * x


def returning_a_number(module, x):
    return x, x.sum().item()


@pytest.mark.parametrize("do", [selecting, changing])
def test_a_module_whose_shapes_depend_on_values_or_that_moves_weights_is_refused_as_before(do):
    torch.manual_seed(0)
    with pytest.raises(
        TraceError, match=r"torch.export cannot trace Sequential, in module '1' \(Inner\), at "
    ):
        trace(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), Inner(do), nn.Linear(WIDTH, 1)), (torch.randn(4, WIDTH),)
        )


class Unpacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = Inner(returning_a_number), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x, number = self.inner(x)
        return self.last(x) * number


def test_a_module_that_returns_numbers_of_values_is_run_with_what_takes_them():
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Unpacks(), nn.Linear(WIDTH, 1)), torch.randn(4, WIDTH)
    traced = trace(model, (x,))
    assert list(traced.opaque) == ["1"]
    check_trace(model, traced, lambda: functional.mse_loss, torch.randn(4, 1))


def test_a_model_that_looks_at_values_itself_runs_as_it_is_in_one_stage_only():
    model, x = Branch(), torch.randn(4, WIDTH)
    with pytest.raises(TraceError, match=r"data-dependent.*with pipeline.stages: 1 all of the model"):
        trace(model, (x,))
    traced = trace(model, (x,), whole=True)
    assert traced.layers == ["model"] and list(traced.opaque) == [""]
    check_trace(model, traced, lambda: functional.mse_loss, torch.randn(4, WIDTH))


def test_a_call_that_returns_another_shape_than_the_recorded_one_is_told_by_module():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.layer(x)
            return x if x.abs().max() < 1e3 else x[:2]

    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Grows(), nn.Linear(WIDTH, 1)), torch.randn(4, WIDTH)
    (stage,) = trace(model, (x,)).cut([]).stages
    stage(x)
    with pytest.raises(
        RuntimeError, match=r"module '1' \(Grows\), which runs as it is: it returned .*\[2, 8\]"
    ):
        stage(x * 1e6)


def test_a_copy_of_a_stage_can_be_pickled_for_other_workers():
    model, x = made("capsules", layers=1)
    (stage,) = trace(model, (x,)).cut([]).stages
    (call,) = opaque_calls(stage)
    again = pickle.loads(pickle.dumps(call))
    given = [x, *model[1].parameters()]
    assert torch.equal(again(*given)[0], call(*given)[0])


def test_a_compiler_leaves_out_a_module_that_runs_as_it_is(monkeypatch):
    model, x = made("branch", layers=1)
    graph = trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), model), (x,)).cut([])
    (stage,) = graph.stages
    expected = [stage(given)[0] for given in (x, -x)]  # one way of the branch, and the other
    reseed_at_random_ops(stage, RandomState(0, 0, torch.device("cpu")))
    monkeypatch.setattr(engine_compile, "BACKEND", "aot_eager")  # inductor's own code takes minutes
    monkeypatch.setattr(engine_compile, "missing_compiler", lambda device: None)
    compiler = engine_compile.StageCompiler(device="cpu", autocast=None, limit_s=3600)
    assert compiler.compile("stage s0", stage, [x]), compiler.notes
    assert stage.compiled.graphs == 2
    for given, of_trace in zip((x, -x), expected, strict=True):
        torch.testing.assert_close(stage(given)[0], of_trace)
    assert stage.compiled.graphs == 2


# Whole jobs


def job(kind, *, stages=3, workers=1, layers=2, **parts):
    training = {"steps": len(STEPS), "global_batch": 16, "microbatches": 4, "seed": 5, "clip_grad_norm": 1.0}
    spec = {
        "model": {"factory": f"{opaque_models.__name__}:build", "args": {"kind": kind, "layers": layers}},
        "data": {"factory": f"{opaque_models.__name__}:Rows"},
        "loss": {"factory": "torch.nn.functional:cross_entropy"},
        "optimizer": {"factory": "torch.optim:SGD", "args": {"lr": 0.1, "momentum": 0.9}},
        "training": {**training, **parts.pop("training", {})},
        "pipeline": {"stages": stages, **parts.pop("pipeline", {})},
        "resources": {"meshes": stages, "workers_per_mesh": workers, "device": "cpu"},
        **parts,
    }
    return JobSpec.model_validate(spec).model_dump(mode="json")


def warm_up(worker):
    """The engine's first run without transfers, as on CUDA."""
    worker.reader.ready(1)
    worker.engine.warm_up(1, *worker.reader.take(1, first=True))


def compare_with_plain_loop(spec, *, rel=1e-5, buffers=True):
    shares = spec["resources"]["workers_per_mesh"]
    plain = PlainJob(spec, shares=shares)
    expected = plain.train(STEPS)
    with Workers(spec) as run:
        run.call(warm_up)
        losses = run.losses(STEPS)
        evaluated = run.evaluate().loss if spec["evaluation"] else None
        states = run.call(lambda worker: worker.engine.state())
    assert losses == pytest.approx(expected.losses, rel=rel)
    reference = plain.model.state_dict()
    for state in states:
        found = {**state["parameters"], **(state["buffers"] if buffers else {})}
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, reference[name], rtol=100 * rel, atol=rel, msg=name)
    if evaluated is not None:
        assert evaluated == pytest.approx(plain.evaluate(), rel=rel)
    return losses


def test_a_job_with_codebooks_is_its_plain_loop():
    compare_with_plain_loop(job("codebook", pipeline={"schedule": "zb-h1"}))


def profile_when_checked(measurements, microbatches):
    measurements._first.trace(microbatches)
    return LayerProfile.from_json(measurements._first.profile(microbatches))


@some_by_day(
    ("kind", "module", "function"),
    [
        ("gradient reversal", "GradientReversal", "_Reversed"),
        ("in place", "InPlace", "_DoubledExp"),
        ("made in forward", "MadeInForward", "Reversed"),
    ],
    by_day=1,
)
def test_a_job_whose_gradients_the_trace_would_lose_is_traced_anew_and_is_its_plain_loop(
    kind, module, function, monkeypatch
):
    spec = job(kind, layers=1)
    assert "1" in [layer.name for layer in LocalMeasurements(Job.from_json(spec), "cpu").profile(4).layers]
    monkeypatch.setattr(PreparedMeasurements, "profile", profile_when_checked)  # as a driver does
    compare_with_plain_loop(spec)
    worker = prepare_workers(Job.from_json(spec))[0]
    (note,) = worker.trace(4)
    assert f"module '1' ({module}) runs as it is" in note and f"{function} has a backward of its own" in note


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("kind", DETERMINISTIC)
def test_a_job_with_modules_as_they_are_is_its_plain_loop(kind, schedule):
    compare_with_plain_loop(job(kind, stages=4, pipeline={"schedule": schedule}))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["all", "by_block"])
@pytest.mark.parametrize("kind", DETERMINISTIC)
def test_a_job_that_recomputes_all_stages_and_evaluates_is_its_plain_loop(kind, recompute):
    evaluation = {"data": {"factory": f"{opaque_models.__name__}:Rows"}, "every_steps": 3, "steps": 2}
    compare_with_plain_loop(job(kind, pipeline={"recompute": recompute}, evaluation=evaluation))


@pytest.mark.parametrize("kind", ["autograd.grad", "vmap of grad"])
def test_a_stage_that_runs_its_blocks_again_has_modules_that_take_derivatives(kind):
    compare_with_plain_loop(job(kind, pipeline={"recompute": "by_block"}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["branch", "while loop", "autograd.grad", "graph"])
def test_a_job_in_bf16_is_its_plain_loop(kind):
    compare_with_plain_loop(job(kind, training={"precision": "bf16"}), rel=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "codebook", "autograd.grad"])
def test_the_job_that_verify_proves_draws_inside_modules_as_its_plain_model_does(kind):
    """With two data-parallel workers, whose buffers are of their own rows."""
    for recompute in ("none", "all", "by_block"):
        proof = proof_of(job(kind, stages=2, workers=2, pipeline={"recompute": recompute}))
        assert proof.difference is None, proof


@pytest.mark.slow
def test_a_job_with_codebooks_is_recomputed_saved_resumed_on_another_cut_and_verified(tmp_path):
    """Its losses are the plain loop's throughout, and so is what it goes on from in half as many stages."""
    spec = job("codebook", stages=4, pipeline={"recompute": "all"})
    plain = PlainJob(spec)
    expected = plain.train(range(1, 6)).losses
    uri = checkpoint_format.step_uri(str(tmp_path), "job", 2)
    with Workers(spec) as run:
        assert len(run.workers) == 4
        losses = run.losses(range(1, 3))
        run.call(lambda worker: worker.begin_save(uri, 2))
        saved = until(lambda: None not in (answers := run.call(lambda worker: worker.saved())) and answers)
        shards = [
            *dict.fromkeys(worker.mesh for worker in run.workers),
            *(n for one in saved for n in one.shards),
        ]
        checkpoint_format.finish_checkpoint(uri, step=2, shards=shards, keep=1)
    with Workers(job("codebook", stages=2, pipeline={"recompute": "all"})) as run:
        assert set(run.call(lambda worker: worker.restore(uri))) == {2}
        losses += run.losses(range(3, 6))
        states = run.call(lambda worker: worker.engine.state())
    assert losses == pytest.approx(expected, rel=1e-6)
    codebooks = {name: value for state in states for name, value in state["buffers"].items()}
    assert codebooks.keys() == dict(plain.model.named_buffers()).keys()
    for name, value in plain.model.named_buffers():
        torch.testing.assert_close(codebooks[name], value, rtol=1e-5, atol=1e-6)
    assert proof_of(spec).difference is None


def test_a_whole_model_as_it_is_trains_in_one_stage_on_two_workers():
    spec = job("branch", stages=1, workers=2)
    spec["model"] = {"factory": "tests.worker.model.test_opaque:Classifier", "args": {}}
    compare_with_plain_loop(JobSpec.model_validate(spec).model_dump(mode="json"))


class Classifier(Branch):
    """Branches on values in the forward of the model itself."""

    def forward(self, x):
        return super().forward(x)[:, :CLASSES]


@pytest.mark.parametrize(
    ("resources", "named"),
    [
        (
            {"meshes": 2, "workers_per_mesh": 2, "tensor": 2, "tensor_plan": {"2": "colwise"}},
            "parallelism.tp is 2",
        ),
        ({"meshes": [{"workers": 2}, {"workers": 1}]}, "resources.meshes have 2, 1 data-parallel workers"),
    ],
    ids=["tensor parallel", "heterogeneous"],
)
@pytest.mark.parametrize(("kind", "name"), [("branch", "Branch"), ("gradient reversal", "GradientReversal")])
def test_layouts_that_look_into_modules_are_refused_with_one_that_runs_as_it_is(resources, named, kind, name):
    spec = {**job(kind, stages=2), "resources": {**resources, "device": "cpu"}}
    worker = prepare_workers(Job.from_json(JobSpec.model_validate(spec).model_dump(mode="json")))[0]
    with pytest.raises(Exception, match=rf"{named}.*module '1' \({name}\), which runs as it is"):
        worker.trace(4)
