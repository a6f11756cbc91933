"""Whole jobs whose meshes share matrices: their losses are those of a plain loop, on any layout and resumed on others."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from service.spec.job import JobSpec
from tests.worker.actor.test_actor import job, plain
from tests.worker.cached import traced_once  # noqa: F401 (used by every test)
from tests.worker.jobs.test_plain_modules import plain_losses, spec_of
from tests.worker.workers import Workers
from worker.checkpoint import format as checkpoint_format
from worker.checks.replicas import shard_mismatch
from worker.contract.failures import AttemptFailure
from worker.contract.job import Job
from worker.contract.profile import CollectiveCost, LayerProfile, ModelError
from worker.contract.reasons import Reason
from worker.parallel.shard_spec import ShardSpec
from worker.parallel.tensor.plans import check_tensor_plan
from worker.verify.local_gang import prepare_workers


def on(layout, spec, **resources):
    """The job on meshes of these (data, tensor) numbers of workers, as the control plane hands it to its workers."""
    meshes = [
        {"workers": data * tensor, "parallel": {"data": data, "tensor": tensor}} for data, tensor in layout
    ]
    spec = {**spec, "resources": {"meshes": meshes, "device": "cpu", **resources}}
    return {**spec, "resources": JobSpec.model_validate(spec).model_dump(mode="json")["resources"]}


def unet():
    spec = job(stages=4)
    spec["model"] = {"factory": "worker.examples.unet:build", "args": {}}
    spec["data"] = {"factory": "worker.examples.digits:NoisyDigits", "args": {}}
    spec["pipeline"]["schedule"] = "auto"
    spec["loss"] = {"factory": "torch.nn.functional:mse_loss"}
    # Adam makes as much of a gradient that is rounding as of any other
    spec["optimizer"] = {"factory": "torch.optim:SGD", "args": {"lr": 0.2, "momentum": 0.9}, "schedule": None}
    return spec


SPECS = {"gpt": job, "unet": unet}
LOSSES = {"gpt": torch.nn.functional.cross_entropy, "unet": torch.nn.functional.mse_loss}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("layout", [(1, 2), (2, 2)])
def test_losses_are_those_of_a_plain_loop(name, layout, tmp_path):
    """Tied weights split by words, fused queries, keys and values, skips, clipping, the optimizer's state."""
    spec = SPECS[name]()
    expected, _ = plain(spec, range(1, 5), LOSSES[name])
    uri = checkpoint_format.step_uri(str(tmp_path), "job", 2)
    with Workers(on([layout, layout], spec)) as workers:
        assert workers.losses(range(1, 3)) == pytest.approx(expected[:2], rel=1e-5)
        held = workers.call(lambda w: sum(p.numel() for s in w.stages.values() for p in s.parameters()))
        workers.call(lambda w: w.save(uri, 2))
        checkpoint_format.finish_checkpoint(uri, step=2, shards=["m0", "m1"], keep=1)
    with Workers(SPECS[name]()) as workers:
        whole = workers.call(lambda w: sum(p.numel() for s in w.stages.values() for p in s.parameters()))
        assert workers.call(lambda w: w.restore(uri)) == [2, 2]
        assert workers.losses(range(3, 5)) == pytest.approx(expected[2:], rel=1e-5)
        workers.call(lambda w: w.save(uri, 4))
        checkpoint_format.finish_checkpoint(uri, step=4, shards=["m0", "m1"], keep=1)
    of_one_sample = [size for at, size in enumerate(held) if at % (layout[0] * layout[1]) < layout[1]]
    assert sum(of_one_sample) < 1.5 * sum(whole), "each has about half of the matrices"


def t5(**changes):
    return spec_of("t5", loss=None, stages=2, meshes=2) | changes


@pytest.mark.slow
def test_an_encoder_and_a_decoder_of_a_public_model():
    pytest.importorskip("transformers")
    spec = t5()
    expected = plain_losses(spec, range(1, 4), lambda model, batch: model(**batch).loss)
    with Workers(on([(1, 2)] * 2, spec)) as workers:
        assert workers.losses(range(1, 4)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_backwards_in_two_parts_and_dropout_are_those_of_one_worker():
    """Masks of the whole tensor, wherever it lies; W sums in one order on all workers."""
    spec = job()
    spec["model"]["args"]["dropout"] = 0.2
    spec["pipeline"]["schedule"] = "zb-h1"
    with Workers(spec) as workers:
        expected = workers.losses(range(1, 4))
    with Workers(on([(1, 2)] * 2, spec)) as workers:
        assert workers.losses(range(1, 4)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_shared_matrices_goes_on_on_other_layouts(tmp_path):
    spec = job()
    expected, _ = plain(spec, range(1, 4))
    uri = checkpoint_format.step_uri(str(tmp_path), "job", 2)
    with Workers(on([(1, 2)] * 2, spec)) as workers:
        workers.losses(range(1, 3))
        workers.call(lambda w: w.save(uri, 2))
        checkpoint_format.finish_checkpoint(uri, step=2, shards=["m0", "m1"], keep=1)
        third = workers.losses(range(3, 4))
    for layout in ([(1, 2)] * 2, [(2, 1)] * 2, [(2, 2)] * 2, [(1, 1)] * 2):
        with Workers(on(layout, spec)) as workers:
            assert set(workers.call(lambda w: w.restore(uri))) == {2}
            again = workers.losses(range(3, 4))
        assert again == pytest.approx(expected[2:], rel=1e-5)
        if layout == [(1, 2)] * 2:
            assert again == third, "the same layout goes on to the bit"


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations of this thread make, or read from files, and that still live."""

    def __init__(self):
        super().__init__()
        self._alive, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        of_a_file = function is torch.ops.aten.set_.source_Storage_storage_offset
        known = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor) and not of_a_file
        }
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in known:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {at: entry for at, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


@pytest.mark.slow
def test_no_worker_ever_holds_a_whole_state_while_it_saves_or_restores(tmp_path):
    """Saving takes no memory besides, a restore that of the worker's own part, from shards of two ranks and of one, and
    where a tensor is whole in its file one of these at a time."""

    def counted(worker, action):
        with HeldBytes() as held:
            action(worker)
        return held.peak

    uris = [checkpoint_format.step_uri(str(tmp_path / name), "job", 1) for name in ("one", "two")]
    for layout, uri in zip(((1, 1), (1, 2)), uris, strict=True):
        with Workers(on([layout] * 2, job())) as run:
            run.losses(range(1, 2))
            slices = run.call(lambda w: max(t.nbytes for t in w.engine.state()["parameters"].values()))
            peaks = run.call(lambda w, uri=uri: counted(w, lambda w: w.save(uri, 1)))
            assert all(peak <= size for peak, size in zip(peaks, slices, strict=True))
            checkpoint_format.finish_checkpoint(uri, step=1, shards=["m0", "m1"], keep=1)
            if layout == (1, 1):
                continue
            states = run.call(lambda w: w.engine.state())
            for saved in uris:
                peaks = run.call(lambda w, uri=saved: counted(w, lambda w: w.restore(uri)))
                for peak, state, largest in zip(peaks, states, slices, strict=True):
                    own = 3 * sum(tensor.nbytes for tensor in state["parameters"].values())  # and two moments
                    blob = largest if saved == uris[1] else 2 * largest
                    assert own <= peak <= 1.02 * own + blob


def test_the_plan_knows_what_is_shared_and_what_is_summed():
    """A worker of two holds half of the matrices, and its times have the sums within F, I and W."""
    spec = job()
    found = {}
    for tensor in (1, 2):
        workers = prepare_workers(Job.from_json(on([(1, tensor)] * 2, spec)))
        found[tensor] = LayerProfile.from_json(workers[0].profile(2))
    whole, shared = (sum(found[n].parameter_sizes.values()) for n in (1, 2))
    assert shared < 0.65 * whole
    assert all(layer.sums == () for layer in found[1].layers)
    sums = [
        {name: (count, size) for name, way, count, size in layer.sums if way == "reduce"}
        for layer in found[2].layers
    ]
    block = next(
        sum for layer, sum in zip(found[2].layers, sums, strict=True) if "blocks.1" in layer.name and sum
    )
    assert set(block) >= {"forward_s", "backward_s", "backward_input_s"}
    longer = found[2].with_tensor_parallel_sums(CollectiveCost((1.0, 1e9), gather=(2.0, 1e8)))
    first, layer = longer.layers[0], found[2].layers[0]
    count, size = sums[0]["forward_s"]
    assert first.forward_s == pytest.approx(layer.forward_s + count + size / 1e9)
    last, layer = longer.layers[-1], found[2].layers[-1]
    gathers = {name: (count, size) for name, way, count, size in layer.sums if way == "gather"}
    count, size = gathers["forward_s"]  # the logits, of every word
    assert (count, size) == (1, 4 * 8 * 256 * 4)
    summed = sum(
        n + size / 1e9 for name, way, n, size in layer.sums if (name, way) == ("forward_s", "reduce")
    )
    assert last.forward_s == pytest.approx(layer.forward_s + 2.0 + size / 1e8 + summed)


@pytest.mark.slow
def test_an_optimizer_whose_state_has_other_shapes_is_refused_when_it_is_saved(tmp_path):
    spec = job()
    spec["optimizer"] = {"factory": "odd_jobs:SgdWithOddState", "args": {}, "schedule": None}
    with Workers(on([(1, 2)] * 2, spec)) as workers:
        workers.losses(range(1, 2))
        with pytest.raises(AttemptFailure, match="whose state has the shape of its parameters"):
            workers.call(lambda w: w.save(checkpoint_format.step_uri(str(tmp_path), "job", 1), 1))


@pytest.mark.parametrize("factory", ["odd_jobs:Rowwise", "torch.optim:Muon"])
def test_an_optimizer_that_makes_something_else_of_parts_of_matrices_is_refused_before_it_does(factory):
    """It would train another model than one worker does, without a word."""
    spec = on([(1, 2), (1, 1)], job())
    spec["optimizer"] = {"factory": factory, "args": {}, "schedule": None}
    name = factory.partition(":")[2]
    with pytest.raises(
        AttemptFailure, match=f"parallelism.tp is 2: optimizer {name} updates a part"
    ) as refused:
        prepare_workers(Job.from_json(spec))[0].optimizer_state()
    assert refused.value.reason is Reason.USER_CODE_RAISED


def test_heads_that_do_not_fit_end_the_attempt_with_what_fits():
    spec = job()
    spec["model"]["args"] |= {"heads": 3, "width": 48}
    said = "3 cannot be split over 2 workers; set `tensor` to one of 1, 3"
    with pytest.raises(AttemptFailure, match=said) as refused:
        Workers(on([(1, 2)] * 2, spec)).__enter__()
    assert refused.value.reason is Reason.PLAN_INFEASIBLE


@pytest.mark.slow
def test_a_matrix_that_two_meshes_would_share_otherwise_is_refused():
    """Of the tied words one mesh would have every second column and the other every second row: as many numbers."""
    spec = job()
    told = []
    for plan in ({"embed.token": "colwise"}, {"embed.token": "vocab"}):
        with Workers(on([(1, 2)] * 2, spec, tensor_plan=plan)) as workers:
            told.append(
                shard_mismatch(["m0/0", "m0/1", "m1/0", "m1/1"], workers.call(lambda w: w.shard_specs()))
            )
    assert told[0].startswith(
        "parameter 'embed.token.weight' has users on several meshes that share it otherwise: parts along dimension 1 of 16 "
        "on m0/0 and parts along dimension 0 of 256 on m1/0; give their modules one style"
    )
    assert told[1] is None
    part, x = ShardSpec("w", 0, (4,), 0, 2), ShardSpec("x")
    assert "'w' has users" in shard_mismatch(["m0/0", "m1/0"], [[part, x], [ShardSpec("w"), x]])


def test_a_model_without_a_known_matrix_is_refused():
    spec = job()
    with pytest.raises(AttemptFailure, match="no module is called"):
        Workers(on([(1, 2)] * 2, spec, tensor_plan={"layers.*.dense": "colwise"})).__enter__()
    with pytest.raises(ModelError, match=r"knows none of the model's modules \(first, last\)"):
        check_tensor_plan(None, ["first.weight", "last.weight"], 2)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 2), (2, 2)])
def test_an_evaluation_uses_the_shared_matrices(layout):
    """With dropout, which an evaluation has none of; training goes on as without."""
    spec = job()
    spec["model"]["args"]["dropout"] = 0.2
    spec["evaluation"] = {"data": {**spec["data"], "prefetch": 2}, "steps": 2}
    found = []
    for each in ((layout[0], 1), layout):
        with Workers(on([each] * 2, spec)) as workers:
            before = workers.evaluate().loss
            losses = workers.losses(range(1, 3))
            found.append([before, *losses, workers.evaluate().loss, *workers.losses(range(3, 4))])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [{"tensor": 2}, {"shard": "optimizer"}], ids=str)
def test_fp16_finds_an_overflow_of_anybodys_part(sharing, monkeypatch):
    """The scale goes down and the step is left out everywhere, as where nobody shares anything."""
    monkeypatch.setattr("worker.engine.optim.grad_scaler.GROWTH_INTERVAL", 3)
    spec = job()
    scaling = {"init_scale": 2.0**22}
    spec["training"] |= {"precision": "fp16", "loss_scaling": scaling, "steps": 12}
    found = []
    for resources in (
        {"workers_per_mesh": 1 if "tensor" in sharing else 2},
        {"workers_per_mesh": 2, **sharing},
    ):
        data = {**spec, "resources": {"meshes": 2, "device": "cpu", **resources}}
        data["resources"] = JobSpec.model_validate(data).model_dump(mode="json")["resources"]
        with Workers(data) as workers:
            steps = [workers.step(number) for number in range(1, 11)]
        assert all(len({(one.loss_scale, one.skipped) for one in step}) == 1 for step in steps)
        found.append([(step[0].loss_scale, step[0].skipped) for step in steps])
        losses = [sum(loss for one in step for loss in one.losses) for step in steps]
    assert found[0] == found[1]
    assert {skipped for _, skipped in found[0]} == {False, True}
    assert losses[-1] < losses[0]
