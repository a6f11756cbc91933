"""shard: optimizer. Each worker of a mesh keeps and updates its part of every parameter; what trains is the same."""

import copy
import functools

import pytest
import torch
from torch import nn

from tests.tiers import some_by_day
from tests.worker.engine.engine_support import (
    LocalPipeline,
    Plain,
    batch,
    chain,
    planned,
    serial_programs,
    tied_chain,
)
from tests.worker.engine.optim.test_reduce_and_step import decaying, with_spare
from worker.contract.buckets import BUCKET_BYTES
from worker.engine.optim.zero1 import ALIGNED_ELEMENTS, FlatPartition, keys_by_bucket, local_partitions
from worker.transport.base import Topology
from worker.transport.local import LocalTransport

MESHES = ["m0", "m1", "m2"]
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.01),  # has a state from the beginning
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, centered=True),
}


def by_shape(parameters):
    """As many jobs have it: vectors do not decay."""
    vectors, matrices = ([p for p in parameters if (p.ndim < 2) == wanted] for wanted in (True, False))
    return torch.optim.AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": matrices}], lr=0.01)


def trained(
    graph, meshes, *, sharded, workers=2, steps=4, optimizer=OPTIMIZERS["adamw"], microbatches=2, **options
):
    """Losses and the state after some steps of a pipeline, and how many bytes each optimizer keeps."""
    programs = serial_programs(graph, meshes, microbatches)
    with LocalPipeline(
        graph,
        meshes,
        programs,
        microbatches,
        optimizer=optimizer,
        workers=workers,
        sharded=sharded,
        **options,
    ) as pipeline:
        losses, norms = [], []
        for step in range(steps):
            parts = [batch(microbatches, seed=10 * step + worker) for worker in range(workers)]
            results = pipeline.step(step, parts)
            losses.append([results[key].losses for key in sorted(results)])
            norms.append({result.grad_norm for result in results.values()})
        return losses, state_of(pipeline), norms, kept(pipeline)


def state_of(pipeline):
    """What all workers of all meshes have, worker by worker, and what a checkpoint would hold."""
    states = pipeline.each(lambda key, engine: (copy.deepcopy(engine.state()), engine.partitions))
    merged = {"parameters": {}, "buffers": {}, "optimizer": {}, "optimizer_groups": [], "lr_schedule": None}
    for (_, worker), (state, partitions) in sorted(states.items(), key=lambda one: one[0]):
        for name, value in state["parameters"].items():
            assert worker == 0 or torch.equal(merged["parameters"].get(name, value), value), name
        if worker == 0:
            for kind in ("parameters", "buffers"):
                merged[kind].update(state[kind])
            merged["optimizer_groups"] += state["optimizer_groups"]
        for name, entry in state["optimizer"].items():
            if worker == 0 and name not in partitions:
                merged["optimizer"][name] = entry
            elif name in partitions:
                join_partition(merged["optimizer"].setdefault(name, {}), entry, partitions[name])
    return merged


def join_partition(whole, entry, run):
    """Put a worker's partition of a parameter's optimizer state in its place."""
    for key, value in entry.items():
        if key == "step" or not isinstance(value, torch.Tensor) or value.shape != (run.end - run.begin,):
            whole.setdefault(key, value)
            continue
        joined = whole.setdefault(key, torch.full(run.shape, torch.nan, dtype=value.dtype))
        joined.view(-1)[run.begin : run.end] = value


def kept(pipeline):
    """Bytes of optimizer state of each worker."""
    return {
        key: sum(
            value.nbytes
            for entry in engine._update.optimizer.state.values()
            for value in entry.values()
            if isinstance(value, torch.Tensor) and value.ndim
        )
        for key, engine in pipeline.engines.items()
        if engine._update.optimizer is not None
    }


def assert_same(found, expected, **tolerance):
    for kind in ("parameters", "optimizer"):
        assert found[kind].keys() == expected[kind].keys()
    for name, value in expected["parameters"].items():
        torch.testing.assert_close(found["parameters"][name], value, **tolerance)
    for name, entry in expected["optimizer"].items():
        assert found["optimizer"][name].keys() == entry.keys()
        for key, value in entry.items():
            torch.testing.assert_close(found["optimizer"][name][key], value, **tolerance)


EXACT = {"rtol": 0.0, "atol": 0.0}


@some_by_day("name", OPTIMIZERS, by_day=3)
def test_two_workers_that_share_an_optimizer_train_to_the_bit_as_two_that_do_not(name):
    """Tied parameters and buckets; every mesh shares, or only one of them."""
    graph, optimizer = tied_chain(), OPTIMIZERS[name]
    losses, expected, _, alone = trained(graph, MESHES, sharded=(), optimizer=optimizer)
    for sharded in (("m0", "m1", "m2"), ("m1",)):
        found, state, _, part = trained(graph, MESHES, sharded=sharded, optimizer=optimizer)
        assert found == losses
        assert_same(state, expected, **EXACT)
        for (mesh, worker), size in part.items():
            if mesh in sharded:
                assert size <= alone[mesh, worker] / 2 + 16
            else:
                assert size == alone[mesh, worker]


@pytest.mark.parametrize("workers", [3, 5])
def test_more_workers_than_a_parameter_has_elements_train_as_those_that_share_nothing(workers):
    graph = tied_chain()
    graph.stages[1].one = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    graph.stages[1].original_names = {**graph.stages[1].original_names, "one": "1.one"}
    inner = graph.stages[1]._function
    graph.stages[1]._function = lambda m, *x: tuple(y * m.one for y in inner(m, *x))
    losses, expected, _, _ = trained(graph, MESHES, sharded=(), workers=workers)
    found, state, _, _ = trained(graph, MESHES, sharded=tuple(MESHES), workers=workers)
    assert torch.tensor(found).flatten().tolist() == pytest.approx(
        torch.tensor(losses).flatten().tolist(), rel=1e-9
    )
    assert_same(state, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("sharded", [("m0", "m1", "m2"), ("m2",)])
def test_clipping_goes_by_the_norm_of_all_parts_of_all_meshes(sharded):
    graph = tied_chain()
    _, expected, norms, _ = trained(graph, MESHES, sharded=(), clip_grad_norm=0.05)
    _, state, shared, _ = trained(graph, MESHES, sharded=sharded, clip_grad_norm=0.05)
    assert all(len(step) == 1 for step in shared)  # all workers know the same
    assert [next(iter(s)) for s in shared] == pytest.approx([next(iter(s)) for s in norms], rel=1e-12)
    assert_same(state, expected, rtol=1e-9, atol=1e-11)


def test_groups_by_shape_are_those_of_whole_parameters():
    graph = tied_chain()
    _, expected, _, _ = trained(graph, MESHES, sharded=(), optimizer=by_shape)
    _, state, _, _ = trained(graph, MESHES, sharded=tuple(MESHES), optimizer=by_shape)
    assert_same(state, expected, **EXACT)
    assert [g["params"] for g in state["optimizer_groups"]] == [
        g["params"] for g in expected["optimizer_groups"]
    ]


def test_frozen_parameters_and_those_in_other_memory_orders_train_as_ever():
    graph = tied_chain()
    first = graph.stages[0]
    first.w.data = first.w.data.t().contiguous().t()
    for p in graph.stages[1].parameters():
        p.requires_grad_(False)
        break
    _, expected, _, _ = trained(graph, MESHES, sharded=())
    _, state, _, _ = trained(graph, MESHES, sharded=tuple(MESHES))
    assert_same(state, expected, rtol=1e-12, atol=1e-14)


def test_a_step_that_is_not_finite_is_left_out_by_all_workers():
    graph = tied_chain()
    programs = serial_programs(graph, MESHES, 1)
    with LocalPipeline(
        graph,
        MESHES,
        programs,
        1,
        optimizer=OPTIMIZERS["adamw"],
        workers=2,
        sharded=("m1", "m2"),
        non_finite="skip",
    ) as pipeline:
        pipeline.step(0, [batch(1, seed=worker) for worker in range(2)])
        before = state_of(pipeline)
        (inputs, targets), good = batch(1, seed=5), batch(1, seed=6)
        broken = (
            [tuple(t * float("nan") if t.is_floating_point() else t for t in one) for one in inputs],
            targets,
        )
        results = pipeline.step(1, [good, broken])
        assert all(result.skipped for result in results.values())
        assert_same(state_of(pipeline), before, **EXACT)


def test_a_parameter_that_no_worker_used_neither_decays_nor_moves():
    graph, meshes = with_spare(lambda x: False), ["m0", "m1"]
    _, expected, _, _ = trained(graph, meshes, sharded=(), optimizer=decaying, microbatches=1)
    _, state, _, _ = trained(graph, meshes, sharded=("m0", "m1"), optimizer=decaying, microbatches=1)
    assert_same(state, expected, **EXACT)


def test_a_parameter_that_one_worker_used_trains_as_where_nothing_is_shared():
    graph, meshes = with_spare(lambda x: bool(x.sum() > 0)), ["m0", "m1"]
    _, expected, _, _ = trained(graph, meshes, sharded=(), optimizer=decaying, microbatches=1)
    _, state, _, _ = trained(graph, meshes, sharded=("m0", "m1"), optimizer=decaying, microbatches=1)
    assert_same(state, expected, **EXACT)


def test_what_is_saved_goes_on_where_nothing_is_shared_and_the_other_way():
    """Shared by two, then by nobody, then by three; each goes on as one run that never stopped."""
    graph, optimizer = tied_chain(), OPTIMIZERS["adam"]
    programs = serial_programs(graph, MESHES, 2)

    def data(step):  # one batch, whoever shares it
        return [batch(2, seed=step)]

    plain = Plain(graph, optimizer)
    state = None
    for step, (workers, sharded) in enumerate(
        [(2, ("m0", "m1", "m2")), (1, ()), (3, ("m0", "m2")), (2, ("m1",))]
    ):
        with LocalPipeline(
            graph, MESHES, programs, 2, optimizer=optimizer, workers=workers, sharded=sharded
        ) as pipeline:
            if state is not None:
                pipeline.each(lambda key, engine, state=state: engine.load_state(copy.deepcopy(state)))
            for number in (2 * step, 2 * step + 1):
                plain.step(*data(number)[0])
                pipeline.step(number, data(number) * workers)
            state = state_of(pipeline)
            for name, value in state["parameters"].items():
                torch.testing.assert_close(value, plain.parameters[name].detach(), rtol=1e-9, atol=1e-11)


def test_buckets_are_scattered_beside_the_backwards():
    """A plan of the scheduler, in which every stage's gradients are summed as soon as they are there."""
    graph, meshes = chain(3), MESHES
    plan, programs = planned(graph, meshes, 3, "1f1b")
    del plan
    results = []
    for sharded in ((), tuple(meshes)):
        with LocalPipeline(
            graph, meshes, programs, 3, optimizer=OPTIMIZERS["adamw"], workers=2, sharded=sharded
        ) as pipeline:
            for step in range(3):
                pipeline.step(step, [batch(3, seed=step + 7 * worker) for worker in range(2)])
            lanes = {i.lane for i in pipeline.engines["m0", 0]._program if i.op == "REDUCE"}
            assert lanes == {"reduce", "compute"}
            results.append(state_of(pipeline))
    assert_same(results[1], results[0], **EXACT)


@pytest.mark.parametrize(
    ("elements", "workers"),
    [(0, 2), (1, 3), (5, 4), (12, 3), (7, 2), (257, 2), (400, 3), (1000, 7), (4096, 4)],
)
def test_parts_are_all_of_a_vector_once(elements, workers):
    flat = torch.arange(elements)
    parts = [FlatPartition(worker, workers) for worker in range(workers)]
    assert torch.cat([one.of(flat) for one in parts]).tolist() == flat.tolist()
    rows = parts[0].all_of(flat)
    assert rows.shape == (workers, parts[0].length(elements))
    for worker, one in enumerate(parts):
        assert one.filled(one.of(flat), elements).tolist() == rows[worker].tolist()


@pytest.mark.parametrize("elements", [129, 254, 255, 256, 257, 400, 1000, 4097, 100_003])
@pytest.mark.parametrize("workers", [2, 3, 8])
def test_long_parts_lie_aligned_and_none_is_longer_than_it_has_to_be(elements, workers):
    parts = [FlatPartition(worker, workers) for worker in range(workers)]
    held = [one.of(torch.arange(elements)) for one in parts]
    even = -(-elements // workers)
    assert max(map(len, held)) <= (even if even < ALIGNED_ELEMENTS else even + ALIGNED_ELEMENTS - 1)
    starts = [int(part[0]) for part in held if len(part)]
    assert even < ALIGNED_ELEMENTS or all(start % ALIGNED_ELEMENTS == 0 for start in starts)


def test_an_update_of_a_part_is_one_of_the_parameter():
    parameter = nn.Parameter(torch.zeros(2, 3))
    (part,) = local_partitions({"w": parameter}, FlatPartition(1, 2)).values()
    with torch.no_grad():
        part.add_(1.0)
    assert parameter.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_scattered_and_gathered_parts_are_those_of_the_sum_and_of_everybody():
    topology = Topology(("m0",), 3)
    transports = LocalTransport.group(topology)
    import threading

    sums, gathered = {}, {}

    def run(worker, transport):
        transport.connect({"g": (0, 1, 2)}, ())
        out = torch.empty(2)
        transport.start_reduce_scatter("g", out, torch.arange(6.0) * (worker + 1))()
        sums[worker] = out.tolist()
        every = torch.empty(3, 1)
        transport.start_all_gather("g", every, torch.tensor([float(worker)]))()
        gathered[worker] = every.tolist()

    threads = [threading.Thread(target=run, args=(w, t)) for (_, w), t in transports.items()]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sums == {0: [0.0, 6.0], 1: [12.0, 18.0], 2: [24.0, 30.0]}
    assert all(found == [[0.0], [1.0], [2.0]] for found in gathered.values())


def test_a_bucket_holds_one_dtype_and_no_more_bytes_than_its_limit_unless_one_tensor_is_longer():
    quarter = BUCKET_BYTES // 4
    bytes_of = {"a": quarter, "b": 2 * quarter, "c": quarter, "d": 4, "e": 4, "f": 3 * BUCKET_BYTES, "g": 4}
    dtypes = dict.fromkeys(bytes_of, torch.float32) | {"e": torch.bfloat16}
    wholes = {
        key: torch.empty(size // dtypes[key].itemsize, dtype=dtypes[key], device="meta")
        for key, size in bytes_of.items()
    }
    vectors = {key: whole[: whole.numel() // 2] for key, whole in wholes.items()}
    assert keys_by_bucket(vectors, wholes) == [["a", "b", "c"], ["d"], ["e"], ["f"], ["g"]]
    assert keys_by_bucket({}, {}) == []
