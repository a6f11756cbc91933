"""Bytes that autograd and recomputed stages really keep, mesh by mesh, beside those that the plan says."""

import contextlib
import functools
import threading

import pytest
import torch
from torch import nn

from service.scheduler.job.cut import PipelineSetup
from service.scheduler.job.partition import partition
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import MeshSpec
from tests.tiers import some_by_day
from tests.worker.engine.engine_support import LocalPipeline
from tests.worker.engine.test_models import MICROBATCHES, gpt_job, unet_job
from worker.benchmark.layer_costs import measure_layers
from worker.contract.planned import recompute_method
from worker.contract.program import program_from_json
from worker.engine import stage as engine_stage
from worker.engine.recomputation.inputs import RecomputeInputs
from worker.engine.recomputation.products import KeptProducts

MESHES = [f"m{i}" for i in range(4)]


class Ledger:
    """The bytes kept on one mesh, shared memory once, without what is always there."""

    def __init__(self):
        self.kept, self.fixed, self.bytes, self.peak = {}, set(), 0, 0

    def take(self, tensor):
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place in self.fixed:
            return tensor
        count, _ = self.kept.get(place, (0, 0))
        if not count:
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
        self.kept[place] = count + 1, storage.nbytes()
        return Box(self, place, tensor.detach())  # itself it would hold its own graph

    def drop(self, place):
        count, size = self.kept.pop(place)
        if count > 1:
            self.kept[place] = count - 1, size
        else:
            self.bytes -= size


class Box:
    """Holds a tensor; the ledger forgets it with this."""

    def __init__(self, ledger, place, tensor):
        self.ledger, self.place, self.tensor = ledger, place, tensor

    def __del__(self):
        self.ledger.drop(self.place)


def open_box(box):
    return box.tensor if isinstance(box, Box) else box


class Watched(nn.Module):
    """A stage whose saved tensors are booked, while `books()`."""

    def __init__(self, stage, ledger, books):
        super().__init__()
        self.books = books
        self.stage, self.inputs, self.outputs = stage, stage.inputs, stage.outputs
        self.original_names = {f"stage.{name}": of for name, of in stage.original_names.items()}
        self.updated_buffers = tuple(f"stage.{name}" for name in stage.updated_buffers)
        self.ledger = ledger

    @property
    def body(self):
        return self.stage.body

    def __deepcopy__(self, memo):
        self.ledger.fixed |= {
            t.untyped_storage().data_ptr() for t in [*self.stage.parameters(), *self.stage.buffers()]
        }
        return self

    def forward(self, *inputs):
        if not self.books():
            return self.stage(*inputs)
        with torch.autograd.graph.saved_tensors_hooks(self.ledger.take, open_box):
            return self.stage(*inputs)


class BookedValues(dict):
    """Values that blocks read, booked until they are let go."""

    def __init__(self, values, ledger):
        super().__init__(values)
        self.boxes = {name: ledger.take(value) for name, value in values.items() if value.numel()}

    def __delitem__(self, name):
        super().__delitem__(name)
        del self.boxes[name]


@functools.cache
def profiled(name):
    job = {"gpt": gpt_job, "unet": unet_job}[name]()
    return job, measure_layers(job.traced, job.loss, job.targets[0], repeats=1)


def planned_and_measured(name, schedule, recompute, mesh_of_stage, monkeypatch):
    """Peak bytes of each mesh by the plan, and as they were."""
    job, profile = profiled(name)
    meshes = list(dict.fromkeys(mesh_of_stage))
    found = partition(
        profile,
        PipelineSetup([MeshSpec(name=mesh) for mesh in meshes], schedule=schedule, recompute=recompute),
        stages=4,
        cut=[profile.layers[len(profile.layers) * s // 4].name for s in range(4)],
        microbatches=MICROBATCHES,
        placement=[meshes.index(mesh) for mesh in mesh_of_stage],
    )
    plan = make_plan(found.spec, budget_s=0.2)
    programs = {
        mesh: program_from_json(i.to_json() if not isinstance(i, dict) else i for i in program)
        for mesh, program in plan.programs.items()
    }
    recomputed = {i: recompute_method(dict(stage)) for i, stage in enumerate(plan.stages) if stage.recomputed}
    graph = job.traced.cut(found.stage_starts)
    ledgers = {mesh: Ledger() for mesh in meshes}
    graph.stages = [
        Watched(s, ledgers[mesh_of_stage[i]], lambda: getattr(running, "books", True))
        for i, s in enumerate(graph.stages)
    ]
    keep, take_arguments = engine_stage.save_recompute_inputs, RecomputeInputs.take_arguments
    keep_none = engine_stage.keeping_no_tensors
    running = threading.local()  # every mesh computes on a thread of its own

    def kept(arguments, buffers, *, selective, by_block):
        found, ledger = keep(arguments, buffers, selective=selective, by_block=by_block), running.ledger
        if selective:
            # booked from when they are made until the run that takes them has ended
            boxes = []
            found.products = KeptProducts(lambda made: boxes.append(ledger.take(made)))
        found.boxes = [ledger.take(value) for value in received(arguments)]
        found.buffers_boxes = [ledger.take(value) for value in found.buffers.values()]
        return found

    def taken(
        kept,
    ):  # the run that takes them books those that autograd keeps; by block they stay until it has ended
        if kept.blocks is not None:
            kept.blocks.values.arguments = kept.boxes
        del kept.boxes
        return take_arguments(kept)

    def received(arguments):
        batch = {t.untyped_storage().data_ptr() for inputs in job.inputs for t in inputs}
        return [v for v in arguments.values if v.untyped_storage().data_ptr() not in batch]

    @contextlib.contextmanager
    def keeping_no_tensors():
        running.books = False
        with keep_none():
            yield
        running.books = True

    def loss(output, target):
        with torch.autograd.graph.saved_tensors_hooks(ledgers[mesh_of_stage[-1]].take, open_box):
            return job.loss(output, target)

    runner_forward = engine_stage.StageRunner.forward

    def forward(self, microbatch):
        running.ledger = self._module.ledger
        runner_forward(self, microbatch)
        if (inputs := self._saved[microbatch].recompute_inputs) is not None and inputs.blocks is not None:
            inputs.blocks.values = BookedValues(inputs.blocks.values, running.ledger)

    def run_forward(module, *arguments, **keywords):  # of a block, outside of the watched stage
        if isinstance(module, Watched) or not running.books:
            return run(module, *arguments, **keywords)
        with torch.autograd.graph.saved_tensors_hooks(running.ledger.take, open_box):
            return run(module, *arguments, **keywords)

    run = engine_stage.run_forward
    monkeypatch.setattr(engine_stage, "run_forward", run_forward)
    monkeypatch.setattr(engine_stage, "save_recompute_inputs", kept)
    monkeypatch.setattr(engine_stage, "keeping_no_tensors", keeping_no_tensors)
    monkeypatch.setattr(RecomputeInputs, "take_arguments", taken)
    monkeypatch.setattr(engine_stage.StageRunner, "forward", forward)
    runner_input, runner_weight = (
        engine_stage.StageRunner.backward_input,
        engine_stage.StageRunner.backward_weight,
    )
    stashes = {}

    def backward_input(self, microbatch):
        runner_input(self, microbatch)
        weights, _ = self._weights[microbatch]
        stashes[self, microbatch] = [self._module.ledger.take(tensor) for tensor in weights.tensors()]

    def backward_weight(self, microbatch):
        runner_weight(self, microbatch)
        del stashes[self, microbatch]

    monkeypatch.setattr(engine_stage.StageRunner, "backward_input", backward_input)
    monkeypatch.setattr(engine_stage.StageRunner, "backward_weight", backward_weight)
    with LocalPipeline(
        graph,
        mesh_of_stage,
        programs,
        MICROBATCHES,
        loss=loss,
        recomputed=recomputed,
    ) as pipeline:
        pipeline.step(0, [(job.inputs, job.targets)])
    monkeypatch.undo()
    planned = {mesh.name: mesh.peak_activation_bytes for mesh in plan.meshes}
    return planned, {mesh: ledger.peak for mesh, ledger in ledgers.items()}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_what_is_planned_is_what_is_kept_with_and_without_recomputing(name, schedule, monkeypatch):
    found = {
        recompute: planned_and_measured(name, schedule, recompute, MESHES, monkeypatch)
        for recompute in ("none", "selective", "by_block", "all")
    }
    for planned, seen in found.values():
        for mesh in MESHES:
            assert seen[mesh] <= planned[mesh]
            # what W needs is taken for all: of a last stage it is less
            assert schedule == "zb-h1" or planned[mesh] <= 1.15 * seen[mesh]
    for number in (0, 1):
        assert sum(found["all"][number].values()) < 0.75 * sum(found["none"][number].values())


@some_by_day("recompute", ["none", "all", ["s1", "s2"]], by_day=2)
@some_by_day(
    ("schedule", "mesh_of_stage"),
    [
        ("auto", ["m0", "m0", "m1", "m1"]),
        ("zb-v", ["m0", "m1", "m1", "m0"]),
        ("interleaved-1f1b", ["m0", "m1", "m0", "m1"]),
    ],
    by_day=2,
)
@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_a_mesh_with_several_stages_keeps_no_more_than_planned(
    name, schedule, mesh_of_stage, recompute, monkeypatch
):
    planned, seen = planned_and_measured(name, schedule, recompute, mesh_of_stage, monkeypatch)
    for mesh in ("m0", "m1"):
        assert 0.4 * planned[mesh] <= seen[mesh] <= planned[mesh]
