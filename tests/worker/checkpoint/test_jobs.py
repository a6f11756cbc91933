"""Whole jobs, without Ray: what one has trained is exported, taken by transformers, and trained on from there."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.reference import accumulate
from tests.worker.actor import test_actor
from tests.worker.jobs import test_plain_modules as test_raw_models
from tests.worker.workers import Workers
from worker.actor.model_host import JobModel
from worker.checkpoint import format as checkpoint_format
from worker.checkpoint.record import RECORD_SHARD, make_record, record_to_state
from worker.checkpoint.weights import export_safetensors
from worker.contract.failures import AttemptFailure
from worker.contract.job import Job
from worker.contract.reasons import Reason
from worker.data.sampler import BatchSampler, collate, read_sample
from worker.model.factory import build_model, call_factory
from worker.verify.plain import PlainModel
from worker.verify.recorder import Probes


def saved(run, base, step):
    """A checkpoint by the workers themselves, as the driver has them save."""
    uri = checkpoint_format.step_uri(base, "job", step)
    others = [name for names in run.call(lambda worker: worker.save(uri, step)) for name in names]
    meshes = dict.fromkeys(worker.mesh for worker in run.workers)
    checkpoint_format.finish_checkpoint(uri, step=step, shards=[*meshes, *others], keep=2)
    return uri


@pytest.mark.slow
def test_what_a_raw_gpt2_has_learnt_is_what_from_pretrained_reads_logit_for_logit(tmp_path):
    transformers = pytest.importorskip("transformers")
    spec = test_raw_models.spec_of("gpt2", loss=None, stages=3, meshes=3)
    factory, arguments = spec["model"]["factory"], spec["model"]["args"]
    batch = {name: torch.as_tensor(value)[None] for name, value in test_raw_models.Texts()[0].items()}
    trained = {}

    def loss_of(model, batch):
        trained["model"] = model
        return model(**batch).loss

    test_raw_models.plain_losses(spec, range(1, 4), loss_of)
    with Workers(spec) as run:
        run.losses(range(1, 4))
        uri = saved(run, str(tmp_path / "c"), 3)
        inside = {name: t for w in run.workers for name, t in w.engine.state()["parameters"].items()}
        inside = {name: t.clone() for name, t in inside.items()}
    found = export_safetensors(uri, str(tmp_path / "out"))
    assert {one.name for one in found.files} == {"model.safetensors", "config.json", "generation_config.json"}
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out").eval()
    chosen = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(chosen) is type(model) and model.config.use_cache, "not turned off as in training"
    assert model.lm_head.weight is model.transformer.wte.weight
    assert all(torch.equal(p, inside[name]) for name, p in model.named_parameters())
    strict = build_model(factory, arguments, seed=99).eval()
    strict.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"), strict=True)
    with torch.no_grad():
        logits = [one(**batch).logits for one in (model, chosen, strict, trained["model"].eval())]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    torch.testing.assert_close(logits[0], logits[3], rtol=1e-4, atol=1e-5)  # the plain loop's
    untrained = build_model(factory, arguments, seed=5).eval()
    with torch.no_grad():
        assert (untrained(**batch).logits - logits[0]).abs().max() > 1e-2


@pytest.mark.slow
def test_a_diffusers_model_is_exported_under_the_names_that_its_library_reads(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    small = {"sample_size": 8, "block_out_channels": (8, 8), "norm_num_groups": 2, "layers_per_block": 1}
    blocks = {
        "down_block_types": ("DownBlock2D",) * 2,
        "up_block_types": ("UpBlock2D",) * 2,
        "add_attention": False,
    }
    model = diffusers.UNet2DModel(**small, **blocks).eval()
    record = make_record(model)
    uri = checkpoint_format.step_uri(str(tmp_path / "c"), "job", 1)
    checkpoint_format.save_shard(
        uri, step=1, shard=RECORD_SHARD, state=record_to_state(record, dict(model.named_parameters()))
    )
    checkpoint_format.finish_checkpoint(uri, step=1, shards=[RECORD_SHARD], keep=1)
    found = export_safetensors(uri, str(tmp_path / "out"))
    assert {one.name for one in found.files} == {"diffusion_pytorch_model.safetensors", "config.json"}
    again = diffusers.UNet2DModel.from_pretrained(tmp_path / "out", low_cpu_mem_usage=False).eval()
    image, time = torch.randn(1, 3, 8, 8), torch.tensor([3])
    with torch.no_grad():
        torch.testing.assert_close(again(image, time).sample, model(image, time).sample)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())


def plain_from(spec, state, steps):
    """Losses of a plain loop that starts from a state_dict."""
    training = spec["training"]
    model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=training["seed"])
    model.load_state_dict(state, strict=True)
    data, count = call_factory(spec["data"]["factory"], spec["data"]["args"]), training["microbatches"]
    sampler = BatchSampler(len(data), training["global_batch"], count, seed=training["seed"])
    optimizer = torch.optim.AdamW(model.parameters(), **spec["optimizer"]["args"])
    losses = []
    for step in steps:
        optimizer.zero_grad()
        samples = [
            [read_sample(data, i, seed=training["seed"], step=step) for i in sampler.indices(step, m)]
            for m in range(count)
        ]
        found = accumulate(model, [collate(one) for one in samples], torch.nn.functional.cross_entropy)
        torch.nn.utils.clip_grad_norm_(model.parameters(), training["clip_grad_norm"])
        optimizer.step()
        losses.append(sum(found) / len(found))
    return losses


def test_a_job_goes_on_from_exported_weights_as_a_plain_loop_does_on_other_stages_and_workers(tmp_path):
    first = test_actor.job(stages=3, meshes=3)
    with Workers(first) as run:
        run.losses(range(1, 4))
        export_safetensors(saved(run, str(tmp_path / "c"), 3), str(tmp_path / "out"))
    state = load_file(tmp_path / "out" / "model.safetensors")
    second = test_actor.job(stages=2, meshes=2, workers_per_mesh=2)
    second["model"]["weights"] = str(tmp_path / "out")
    expected = plain_from(second, state, range(1, 4))
    plain = PlainModel(Job.from_json(second), 2, [], Probes())
    assert all(torch.equal(value, state[name]) for name, value in plain.model.state_dict().items())
    with Workers(second) as run:
        for worker in run.workers:
            own = worker.engine.state()["parameters"]
            assert own and all(torch.equal(t, state[name]) for name, t in own.items()), "bit for bit"
        assert run.losses(range(1, 4)) == pytest.approx(expected, rel=1e-5)
        again = saved(run, str(tmp_path / "again"), 3)
    export_safetensors(again, str(tmp_path / "out2"))
    assert load_file(tmp_path / "out2" / "model.safetensors").keys() == state.keys()
    fresh = plain_from(
        second, build_model(second["model"]["factory"], second["model"]["args"], seed=5).state_dict(), [1]
    )
    assert fresh[0] != pytest.approx(expected[0], rel=1e-3), "else where it starts would not matter here"


def test_weights_that_do_not_fit_are_refused_when_the_model_is_traced_before_anything_is_planned(tmp_path):
    spec = test_actor.job()
    spec["model"]["weights"] = str(tmp_path / "none.safetensors")
    sample = (torch.zeros(2, 8, dtype=torch.long),)
    with pytest.raises(AttemptFailure, match=r"none\.safetensors' is not there") as caught:
        JobModel(Job.from_json(spec), "cpu").traced(sample)
    assert caught.value.reason is Reason.MODEL_BUILD_FAILED
