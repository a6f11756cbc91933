"""torch.distributed.checkpoint (DCP) reads what a job has saved, and a job starts from what DCP has written."""

from __future__ import annotations

import os
import pickle
from fnmatch import fnmatch

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.nn import functional

from tests.reference import accumulate
from tests.worker.actor import test_actor
from tests.worker.checkpoint.test_jobs import saved
from tests.worker.jobs.test_heterogeneous_meshes import unet
from tests.worker.workers import Workers
from worker.checkpoint import format as checkpoint_format
from worker.checkpoint.dcp import DcpFolder
from worker.checkpoint.sources import open_weights
from worker.checkpoint.weights import ExportTargetError, export_job
from worker.contract.job import Job
from worker.contract.profile import ModelError
from worker.contract.tasks import ExportRequest
from worker.data.sampler import BatchSampler, collate, read_sample
from worker.model.factory import build_model, call_factory

LOSSES = {"gpt": functional.cross_entropy, "unet": functional.mse_loss}
GROUPS = [{"match": ["*.bias", "*norm*"], "weight_decay": 0.0}]


def spec_of(name):
    spec = test_actor.job() if name == "gpt" else unet()
    spec["optimizer"] = test_actor.job()["optimizer"]
    spec["optimizer"]["groups"] = GROUPS
    return spec


def plain_of(spec, seed):
    """The plain model and its optimizer as somebody without Slotline makes them, in another order of groups."""
    job = Job.from_json(spec)
    model = build_model(job.model.factory, job.model.args, seed=seed)
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        matched = any(fnmatch(name, pattern) for group in GROUPS for pattern in group["match"])
        (others if matched else decayed).append(parameter)
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed}]
    return model, torch.optim.AdamW(groups, **job.optimizer.args)


def plain_step(spec, model, optimizer, step, loss):
    """The loss of a plain step over the batch of `step`."""
    data = call_factory(spec["data"]["factory"], spec["data"]["args"])
    training = spec["training"]
    count, seed = training["microbatches"], training["seed"]
    sampler = BatchSampler(len(data), training["global_batch"], count, seed=seed)
    samples = [
        [read_sample(data, i, seed=seed, step=step) for i in sampler.indices(step, m)] for m in range(count)
    ]
    optimizer.zero_grad()
    found = accumulate(model, [collate(one) for one in samples], loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), training["clip_grad_norm"])
    optimizer.step()
    return sum(found) / len(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_dcp_loads_what_a_run_saved_into_the_plain_model_and_its_next_step_is_the_runs(name, tmp_path):
    """Every parameter, every state of the optimizer, every setting of its groups, bit for bit."""
    spec = spec_of(name)
    with Workers(spec) as run:
        run.losses(range(1, 3))
        uri = saved(run, str(tmp_path / "c"), 2)
        after = run.losses(range(3, 4))[0]
        next_uri = saved(run, str(tmp_path / "c"), 3)
    state, _ = checkpoint_format.load_checkpoint(uri)
    for flat in (False, True):
        model, optimizer = plain_of(spec, seed=99)
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
        given = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(given, checkpoint_id=uri, no_dist=True)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=given["model"],
            optim_state_dict=given["optimizer"],
            options=options,
        )
        for parameter_name, parameter in model.named_parameters():
            assert torch.equal(parameter, state["parameters"][parameter_name]), parameter_name
            entry = state["optimizer"][parameter_name]
            assert entry.keys() == optimizer.state[parameter].keys()
            for key, value in entry.items():
                assert torch.equal(optimizer.state[parameter][key], value), (parameter_name, key)
        assert sorted(group["weight_decay"] for group in optimizer.param_groups) == sorted(
            {group["weight_decay"] for group in state["optimizer_groups"]}
        )
        loss = plain_step(spec, model, optimizer, 3, LOSSES[name])
        assert loss == pytest.approx(after, rel=1e-6)
        expected, _ = checkpoint_format.load_checkpoint(next_uri)
        for parameter_name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.detach(), expected["parameters"][parameter_name], rtol=1e-5, atol=1e-6
            )


def test_a_job_starts_from_a_folder_of_dcp_and_each_stage_reads_its_own_tensors(tmp_path, monkeypatch):
    spec = test_actor.job()
    trained, optimizer = plain_of(spec, seed=3)
    folder = tmp_path / "dcp"
    model_state, optimizer_state = get_state_dict(trained, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder, no_dist=True)
    spec["model"]["weights"] = str(folder)
    read = []
    whole = DcpFolder.read
    monkeypatch.setattr(DcpFolder, "read", lambda self, name: (read.append(name), whole(self, name))[1])
    with Workers(spec) as run:
        assert not [name for name in read if not name.startswith("model.")]
        values = dict(trained.named_parameters())
        for worker in run.workers:
            for name, parameter in worker.engine.state()["parameters"].items():
                assert torch.equal(parameter, values[name]), name
        assert len(read) <= len(get_model_state_dict(trained)) + 2 * len(run.workers), (
            "not all by every worker"
        )


def test_what_dcp_wrote_without_a_name_around_it_and_in_pieces_of_several_processes_is_read(tmp_path):
    """A tensor in two chunks, as two processes write theirs: DCP's planner joins them."""
    whole = torch.arange(12.0).reshape(4, 3)
    dcp.save({"a": whole[:2].clone(), "b": whole[2:].clone()}, checkpoint_id=tmp_path / "one", no_dist=True)
    path = tmp_path / "one" / ".metadata"
    told = pickle.loads(path.read_bytes())
    chunks = [metadata.ChunkStorageMetadata(torch.Size(at), torch.Size((2, 3))) for at in ((0, 0), (2, 0))]
    joined = metadata.TensorStorageMetadata(metadata.TensorProperties(), torch.Size((4, 3)), chunks)
    places = {
        metadata.MetadataIndex("w", chunk.offsets): told.storage_data[metadata.MetadataIndex(name, (0, 0))]
        for name, chunk in zip("ab", chunks, strict=True)
    }
    path.write_bytes(pickle.dumps(metadata.Metadata({"w": joined}, {"w": ("w",)}, places)))
    with open_weights(str(tmp_path / "one")) as files:
        assert files.shapes["w"].shape == (4, 3) and torch.equal(files.read("w"), whole)


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_nothing_in_a_folder_of_dcp_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "bad", no_dist=True)
    (tmp_path / "bad" / ".metadata").write_bytes(pickle.dumps({"w": Runs()}))
    said = r"\.metadata cannot be read .* it names posix\.mkdir"
    with pytest.raises(ModelError, match=said), open_weights(str(tmp_path / "bad")):
        pass
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            {"weights": {"w": torch.ones(2)}},
            "has the tensors of a model neither by their own names nor in one of",
        ),
        (
            {"model": {"w": torch.ones(2)}, "module": {"w": torch.ones(2)}},
            "has weights in 'model' and in 'module'",
        ),
        ({"step": 3}, "it holds no tensors"),
    ],
)
def test_a_folder_without_one_model_is_refused_with_what_it_holds(tmp_path, content, said):
    dcp.save(content, checkpoint_id=tmp_path / "odd", no_dist=True)
    with pytest.raises(ModelError, match=said), open_weights(str(tmp_path / "odd")):
        pass


def test_a_missing_file_of_dcp_is_named(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "cut", no_dist=True)
    (tmp_path / "cut" / "__0_0.distcp").unlink()
    with (
        open_weights(str(tmp_path / "cut")) as files,
        pytest.raises(ModelError, match=r"'w' of .*cut cannot be read"),
    ):
        files.read("w")


def laid(base, step=4):
    """A checkpoint of two meshes that share a parameter, with groups of their own."""
    uri = checkpoint_format.step_uri(base, "job", step)
    for mesh, state in states_of_two_meshes(step).items():
        checkpoint_format.save_shard(uri, step=step, shard=mesh, state=state)
    checkpoint_format.finish_checkpoint(uri, step=step, shards=["m0", "m1"], keep=9)
    return uri


def states_of_two_meshes(step):
    return {
        mesh: {
            "parameters": {name: torch.full((2,), float(step)) for name in names},
            "optimizer": {name: {"exp_avg": torch.ones(2)} for name in names},
            "optimizer_groups": [
                {"lr": 0.1, "fused": True, "params": names[:1]},
                {"lr": 0.2, "fused": True, "params": names[1:]},
            ],
        }
        for mesh, names in (("m0", ["tied", "a"]), ("m1", ["tied", "b"]))
    }


def test_the_groups_of_all_meshes_are_the_plain_optimizers_without_a_devices_settings(tmp_path):
    state = {}
    dcp.state_dict_loader._load_state_dict(
        state,
        storage_reader=dcp.FileSystemReader(laid(str(tmp_path))),
        planner=_EmptyStateDictLoadPlanner(keys={"optimizer"}),
        no_dist=True,
    )
    assert state["optimizer"]["param_groups"] == [
        {"lr": 0.1, "fused": None, "params": ["tied"]},
        {"lr": 0.2, "fused": None, "params": ["a", "b"]},
    ]


def test_an_export_in_another_format_is_refused_with_the_way_to_read_a_checkpoint(tmp_path):
    laid(str(tmp_path))
    with pytest.raises(
        ExportTargetError, match="format is 'dcp': weights are written as safetensors, and torch"
    ):
        export_job(ExportRequest(str(tmp_path), "job", format="dcp"))


def test_a_job_starts_from_a_checkpoint_of_another_as_from_any_folder_of_dcp(tmp_path):
    spec = test_actor.job()
    with Workers(spec) as run:
        run.losses(range(1, 2))
        uri = saved(run, str(tmp_path / "c"), 1)
    state, _ = checkpoint_format.load_checkpoint(uri)
    spec["model"]["weights"] = uri
    with Workers(spec) as run:
        for worker in run.workers:
            for name, parameter in worker.engine.state()["parameters"].items():
                assert torch.equal(parameter, state["parameters"][name]), name
