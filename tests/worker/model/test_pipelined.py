"""The whole way of a model (trace, profile, cut, plan, engine) ends in the results of a plain loop."""

import copy
import functools
import threading

import pytest
import torch
from torch.nn import functional

from service.scheduler.job.cut import PipelineSetup
from service.scheduler.job.partition import partition
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import MeshSpec, NetworkSpec
from tests.reference import dataset_batches, train
from tests.tiers import some_by_day
from tests.worker.engine.engine_support import make_engine
from tests.worker.model.odd_models import ODD_MODELS, make
from worker.benchmark.layer_costs import measure_layers
from worker.checkpoint import format as checkpoint_format
from worker.contract.planned import MeshProgram
from worker.contract.program import program_from_json
from worker.data.sampler import BatchSampler, collate
from worker.engine.results import RunOptions
from worker.examples.text import ByteWindows
from worker.model.export import trace
from worker.model.factory import build_model
from worker.transport.base import Topology
from worker.transport.local import LocalTransport

CLIP = 1.0


class Pipeline:
    """Every mesh of a planned model in this process, one thread each."""

    def __init__(self, model, batch, loss, *, stages, meshes, schedule, optimizer):
        traced = trace(model, batch[0][0])
        result = partition(
            measure_layers(traced, loss, batch[0][1], repeats=2),
            PipelineSetup(
                [MeshSpec(name=f"m{i}") for i in range(meshes)],
                NetworkSpec(bandwidth_bytes_per_s=1e9, latency_s=1e-5, contention="full-duplex"),
                schedule=schedule,
            ),
            stages=stages,
            microbatches=len(batch),
        )
        graph = traced.cut(result.stage_starts)
        plan = make_plan(result.spec, budget_s=0.5)
        mesh_of_stage = tuple(stage.mesh for stage in result.spec.stages)
        topology = Topology(meshes=tuple(mesh.name for mesh in result.spec.meshes), workers_per_mesh=1)
        transports = LocalTransport.group(topology)
        self.engines = [
            make_engine(
                transports[mesh, 0],
                MeshProgram(
                    program_from_json(i if isinstance(i, dict) else i.to_json() for i in plan.programs[mesh]),
                    len(batch),
                ),
                graph,
                mesh_of_stage,
                loss=loss,
                optimizer=optimizer,
                options=RunOptions(clip_grad_norm=CLIP, seed=None),
            )
            for mesh in topology.meshes
        ]
        self._together(lambda engine: engine.connect())

    def step(self, number, batch):
        results = self._together(
            lambda engine: engine.run_step(
                number, [inputs for inputs, _ in batch], [target for _, target in batch]
            )
        )
        losses = next(result.losses for result in results if result.losses)
        return sum(losses) / len(losses), results[0].grad_norm

    def state(self):
        states = [engine.state() for engine in self.engines]
        return {name: value for s in states for name, value in (s["parameters"] | s["buffers"]).items()}

    def _together(self, call):
        results, errors = [None] * len(self.engines), []

        def run(index, engine):
            try:
                results[index] = call(engine)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=item) for item in enumerate(self.engines)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._together(lambda engine: engine.close())


def compare(model, batch_of_step, loss, *, steps, rel, **pipeline):
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    plain = copy.deepcopy(model)
    expected = train(plain, batch_of_step, steps=steps, loss=loss, optimizer=optimizer, clip_grad_norm=CLIP)
    with Pipeline(model, batch_of_step(0), loss, optimizer=optimizer, **pipeline) as run:
        for step, record in zip(steps, expected, strict=True):
            found, norm = run.step(step, batch_of_step(step))
            assert found == pytest.approx(record.loss, rel=rel), f"step {step}"
            assert norm == pytest.approx(record.grad_norm, rel=100 * rel), f"step {step}"
        state = run.state()
    reference = dict([*plain.named_parameters(), *plain.named_buffers()])
    persistent = plain.state_dict()
    reference = {name: value.detach() for name, value in reference.items() if name in persistent}
    assert state.keys() == reference.keys()
    return state, reference


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "auto"])
@pytest.mark.parametrize("tied", [False, True])
def test_ten_steps_of_a_gpt_on_real_text_equal_the_plain_loop(schedule, tied):
    args = {"layers": 4, "width": 32, "heads": 2, "length": 32, "tied": tied}
    model = build_model("worker.examples.gpt:build", args, seed=1)
    data = ByteWindows(32)
    batches = dataset_batches(data, BatchSampler(len(data), 16, 4, seed=1), collate)
    compare(
        model,
        batches,
        functional.cross_entropy,
        steps=range(1, 11),
        rel=1e-5,
        stages=4,
        meshes=4,
        schedule=schedule,
    )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "auto"])
def test_ten_steps_of_a_unet_on_real_images_equal_the_plain_loop(schedule):
    from worker.examples.digits import NoisyDigits

    model = build_model("worker.examples.unet:build", {"width": 8}, seed=1)
    data = NoisyDigits()
    batches = dataset_batches(data, BatchSampler(len(data), 16, 4, seed=1), collate)
    compare(
        model,
        batches,
        functional.mse_loss,
        steps=range(1, 11),
        rel=1e-5,
        stages=4,
        meshes=4,
        schedule=schedule,
    )


@some_by_day(("stages", "meshes", "schedule"), [(3, 3, "zb-h1"), (2, 1, "auto")], by_day=1)
@some_by_day("name", [name for name in ODD_MODELS if "dropout" not in name], by_day=4)
def test_odd_models_train_as_in_the_plain_loop(name, stages, meshes, schedule):
    model, inputs = make(name)
    size = copy.deepcopy(model)(*inputs).shape

    def batches(step):
        generator = torch.Generator().manual_seed(step)
        return [
            (
                tuple(
                    torch.randn(x.shape, dtype=x.dtype, generator=generator)
                    if x.is_floating_point()
                    else torch.randint(0, 11, x.shape, generator=generator)
                    for x in inputs
                ),
                torch.randn(size, dtype=torch.float64, generator=generator),
            )
            for _ in range(4)
        ]

    state, reference = compare(
        model,
        batches,
        functional.mse_loss,
        steps=range(1, 4),
        rel=1e-10,
        stages=stages,
        meshes=meshes,
        schedule=schedule,
    )
    for key, value in reference.items():
        torch.testing.assert_close(state[key], value, rtol=1e-7, atol=1e-9)


@some_by_day("name", ["tied embedding", "constants", "batch norm", "two branches"], by_day=2)
def test_a_run_goes_on_from_a_checkpoint_with_fewer_meshes(name, tmp_path):
    """Three steps on three meshes, a checkpoint, three more on two: as six of the plain loop."""
    model, inputs = make(name)
    size = copy.deepcopy(model)(*inputs).shape

    def batches(step):
        generator = torch.Generator().manual_seed(step)
        return [
            (inputs, torch.randn(size, dtype=torch.float64, generator=generator)),
            (inputs, torch.randn(size, dtype=torch.float64, generator=generator)),
        ]

    optimizer = functools.partial(torch.optim.AdamW, lr=1e-2)
    plain = copy.deepcopy(model)
    expected = train(
        plain, batches, steps=range(1, 7), loss=functional.mse_loss, optimizer=optimizer, clip_grad_norm=CLIP
    )
    arguments = {"loss": functional.mse_loss, "optimizer": optimizer, "schedule": "1f1b"}
    uri = checkpoint_format.step_uri(str(tmp_path), "job", 3)
    with Pipeline(model, batches(0), stages=3, meshes=3, **arguments) as run:
        for step in range(1, 4):
            run.step(step, batches(step))
        for mesh, engine in enumerate(run.engines):
            checkpoint_format.save_shard(uri, step=3, shard=f"m{mesh}", state=engine.state())
        checkpoint_format.finish_checkpoint(uri, step=3, shards=["m0", "m1", "m2"], keep=1)
    fresh, _ = make(
        name, seed=0 if name == "constants" else 1
    )  # a table that is no state comes from the seed
    with Pipeline(fresh, batches(0), stages=2, meshes=2, **arguments) as run:
        for engine in run.engines:  # each worker reads the checkpoint for itself
            state, step = checkpoint_format.load_checkpoint(uri)
            engine.load_state(state)
        for later in range(step + 1, 7):
            found, _ = run.step(later, batches(later))
            assert found == pytest.approx(expected[later - 1].loss, rel=1e-9)
