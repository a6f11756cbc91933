"""Mixtures of experts with their routers' loss, as configurations of transformers ask for it and as a job's own loss adds
it: made in every layer, it is trained as in a plain loop."""

from __future__ import annotations

import pytest
import torch

from tests.missing import needs_libraries
from tests.worker.jobs import test_plain_modules as raw
from tests.worker.workers import Workers

pytestmark = needs_libraries("transformers")


LARGE = {"num_hidden_layers": 4, "intermediate_size": 24, "num_key_value_heads": 2}
LARGE |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}
CAUSAL = "transformers:AutoModelForCausalLM.from_config"
MODELS = {
    "mixtral": (CAUSAL, "transformers:MixtralConfig", raw.SMALL | LARGE | {"num_local_experts": 4}, 0),
    "qwen2 moe": (
        CAUSAL,
        "transformers:Qwen2MoeConfig",
        raw.SMALL
        | LARGE
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 16},
        0,
    ),
    "switch": (
        "transformers:SwitchTransformersForConditionalGeneration",
        "transformers:SwitchTransformersConfig",
        {"num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
        | {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_heads": 2, "vocab_size": raw.WORDS, "num_experts": 4}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0, "output_router_logits": True}
        | {"router_jitter_noise": 0.0},
        0,
    ),
}  # fmt: skip


def spec_of(name, loss, **layout):
    spec = raw.spec_of(name, loss=loss, **layout)
    spec["pipeline"]["schedule"] = "auto"
    return spec


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_models_own_router_loss_is_in_its_loss(name, monkeypatch):
    monkeypatch.setattr(raw, "MODELS", raw.MODELS | MODELS)
    spec = spec_of(name, None, stages=4, meshes=2)
    shares = []

    def loss_of(model, batch):
        found = model(**batch)
        if name != "switch":
            shares.append(float(found.aux_loss.detach() / found.loss.detach()))
        return found.loss

    expected = raw.plain_losses(spec, range(1, 4), loss_of)
    assert min(shares, default=1) > 0.05, "it is no small part"
    with Workers(spec) as run:
        assert run.losses(range(1, 4)) == pytest.approx(expected, rel=1e-5)


def with_routers(output, labels):
    """Cross entropy of the next words, the balance of the routers and their z-loss."""
    words = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    z = sum(logits.logsumexp(-1).square().mean() for logits in output.router_logits)
    return words + 0.1 * output.aux_loss + 0.01 * z, {"z": z, "balance": output.aux_loss}


@pytest.mark.slow
def test_a_jobs_loss_takes_the_logits_of_all_routers(monkeypatch):
    monkeypatch.setattr(raw, "MODELS", raw.MODELS | MODELS)
    spec = spec_of("mixtral", {"factory": f"{__name__}:with_routers"}, stages=4, meshes=4)

    def loss_of(model, batch):
        labels = batch.pop("labels")
        return with_routers(model(**batch, use_cache=False), labels)[0]

    expected = raw.plain_losses(spec, range(1, 4), loss_of)
    with Workers(spec) as run:
        assert run.losses(range(1, 4)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_experts_that_cannot_be_traced_run_as_they_are_and_name_the_setting_that_avoids_it(monkeypatch):
    monkeypatch.setattr(raw, "MODELS", raw.MODELS | MODELS)
    spec = spec_of("mixtral", None, stages=2, meshes=2)
    spec["model"]["args"]["config"]["args"] = LARGE | raw.SMALL | {"experts_implementation": "eager"}
    expected = raw.plain_losses(spec, range(1, 3), lambda model, batch: model(**batch, use_cache=False).loss)
    with Workers(spec) as run:
        assert run.losses(range(1, 3)) == pytest.approx(expected, rel=1e-5)
    (told,) = (note for note in run.notes if "runs as it is" in note)
    assert "experts_implementation in the model's configuration to grouped_mm or batched_mm" in told
