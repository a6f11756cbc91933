"""Adapters of peft: what is exported is what `PeftModel.from_pretrained` takes, and a job starts from the
weights of the model below."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.missing import needs_libraries
from tests.worker.checkpoint.test_jobs import saved
from tests.worker.jobs import test_plain_modules as test_raw_models
from tests.worker.workers import Workers
from worker.checkpoint.adapters import base_model_name
from worker.checkpoint.record import make_record, record_from_state, record_to_state
from worker.checkpoint.weights import ExportTargetError, export_job, export_safetensors
from worker.contract.failures import AttemptFailure
from worker.contract.tasks import ExportRequest
from worker.model.factory import build_model

pytestmark = needs_libraries("transformers", "peft")


def spec_of(adapters, name="gpt2", *, stages=3, weights=None, freeze=()):
    spec = test_raw_models.spec_of(name, loss=None, stages=stages, meshes=2)
    base = {"factory": spec["model"]["factory"], "args": spec["model"]["args"]}
    config = {"factory": "peft:LoraConfig", "args": {"init_lora_weights": False, **adapters}}
    spec["model"] = {"factory": "peft:get_peft_model", "args": {"model": base, "peft_config": config}}
    spec["model"] |= {"weights": weights, "freeze": list(freeze)}
    spec["pipeline"]["schedule"] = "auto"
    return spec


def batch():
    return {name: torch.as_tensor(value)[None] for name, value in test_raw_models.Texts()[0].items()}


def logits(model):
    with torch.no_grad():
        return model.eval()(**batch()).logits


CASES = {
    "gpt2": ("gpt2", {"r": 2, "target_modules": ["c_attn", "wpe"], "fan_in_fan_out": True}),
    "llama": ("llama", {"r": 2, "lora_alpha": 6, "target_modules": "all-linear", "use_rslora": True}),
    "trained head": ("llama", {"r": 3, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_trained_adapters_are_read_and_merged_by_peft(case, tmp_path):
    import peft

    name, adapters = CASES[case]
    spec = spec_of(adapters, name)
    trained = {}

    def loss_of(model, batch):
        trained["model"] = model
        return model(**batch).loss

    expected = test_raw_models.plain_losses(spec, range(1, 4), loss_of)
    with Workers(spec) as run:
        assert run.losses(range(1, 4)) == pytest.approx(expected, rel=1e-5)
        uri = saved(run, str(tmp_path / "c"), 3)
    found = export_safetensors(uri, str(tmp_path / "out"))
    assert {one.name for one in found.files} == {"adapter_model.safetensors", "adapter_config.json"}
    base = build_model(spec["model"]["factory"], spec["model"]["args"], seed=5).unload()
    below = logits(base)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "out")
    plain = trained["model"]
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)
    assert (logits(model) - below).abs().max() > 1e-3, "else nothing would have been trained"
    assert load_file(tmp_path / "out" / "adapter_model.safetensors").keys() == {
        name for name in peft.get_peft_model_state_dict(plain, save_embedding_layers=False)
    }
    merged = model.merge_and_unload()
    assert type(merged) is type(base)
    torch.testing.assert_close(logits(merged), logits(plain), rtol=1e-4, atol=1e-5)


def below_of(spec, tmp_path):
    """Weights of the model below, others than its factory makes, under its own names."""
    inner = spec["model"]["args"]["model"]
    model = build_model(inner["factory"], inner["args"], seed=77)
    state = {name: (0.5 * tensor).clone() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    return state


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt2", "trained head"])
def test_a_job_of_adapters_starts_from_the_weights_of_the_model_below_with_parts_frozen(case, tmp_path):
    name, adapters = CASES[case]
    spec = spec_of(
        adapters, name, weights=str(tmp_path / "model.safetensors"), freeze=["re:.*lora_(embedding_)?A"]
    )
    below = below_of(spec, tmp_path)
    model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=5)
    with torch.no_grad():
        for full, parameter in model.named_parameters():
            if (inner := base_model_name(full)) in below:
                parameter.copy_(below[inner])
    for full, parameter in model.named_parameters():
        if "lora_A" in full or "lora_embedding_A" in full:
            parameter.requires_grad_(False)
    before = {full: p.detach().clone() for full, p in model.named_parameters()}
    expected = plain(model, spec)
    with Workers(spec) as run:
        assert run.losses(range(1, 4)) == pytest.approx(expected, rel=1e-5)
        now = {name: t for w in run.workers for name, t in w.engine.state()["parameters"].items()}
    moved = {full for full, tensor in now.items() if not torch.equal(tensor, before[full])}
    assert moved == {full for full, p in model.named_parameters() if p.requires_grad}
    assert all("lora_B" in full or "embedding_B" in full or "modules_to_save" in full for full in moved)


def plain(model, spec):
    training, data = spec["training"], test_raw_models.Texts()
    count = training["microbatches"]
    sampler = test_raw_models.BatchSampler(len(data), training["global_batch"], count, seed=training["seed"])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    means = []
    for step in range(1, 4):
        optimizer.zero_grad()
        losses = []
        for m in range(count):
            rows = [data[index] for index in sampler.indices(step, m)]
            loss = model(
                **{key: torch.stack([torch.as_tensor(r[key]) for r in rows]) for key in rows[0]}
            ).loss
            (loss / count).backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(
            [p for p in model.parameters() if p.requires_grad], training["clip_grad_norm"]
        )
        optimizer.step()
        means.append(sum(losses) / count)
    return means


@pytest.mark.slow
def test_weights_that_lack_a_part_of_the_model_below_are_refused_by_name(tmp_path):
    spec = spec_of(CASES["llama"][1], "llama", weights=str(tmp_path / "model.safetensors"))
    state = below_of(spec, tmp_path)
    lost = next(name for name in state if "mlp" in name)
    save_file({n: t.clone() for n, t in state.items() if n != lost}, tmp_path / "model.safetensors")
    with pytest.raises(AttemptFailure, match=f"missing: {lost}"), Workers(spec):
        pass


@pytest.mark.slow
def test_adapters_go_on_from_a_checkpoint_on_other_stages_as_if_nothing_had_been(tmp_path):
    spec = spec_of(CASES["gpt2"][1], "gpt2")
    expected = test_raw_models.plain_losses(spec, range(1, 6), lambda model, batch: model(**batch).loss)
    with Workers(spec) as run:
        run.losses(range(1, 4))
        uri = saved(run, str(tmp_path / "c"), 3)
    with Workers(spec_of(CASES["gpt2"][1], "gpt2", stages=2)) as run:
        assert set(run.call(lambda worker: worker.restore(uri))) == {3}
        assert run.losses(range(4, 6)) == pytest.approx(expected[3:], rel=1e-5)


def adapted(**adapters):
    import peft

    factory, config, arguments, _ = test_raw_models.MODELS["llama"]
    model = build_model(factory, {"config": {"factory": config, "args": arguments}}, seed=1)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], **adapters))


def test_a_record_of_adapters_comes_back_from_a_checkpoint_of_an_older_version_too():
    record = make_record(adapted(use_dora=True))
    assert record.adapters is not None and record.adapters.entries
    state = record_to_state(record, {})
    assert record_from_state(state) == record
    state["record"]["adapters"] |= {
        "deltas": {"weight": ["a", "b", 2.0, False]},
        "unmergeable": "",
    }
    assert record_from_state(state) == record


def test_a_merged_export_is_refused_with_how_peft_merges():
    with pytest.raises(ExportTargetError, match=r"leave out `merged`, and merge .*merge_and_unload"):
        export_job(ExportRequest("/none", "job", merged=True))


def test_a_model_without_adapters_has_none():
    assert make_record(nn.Linear(2, 2)).adapters is None
