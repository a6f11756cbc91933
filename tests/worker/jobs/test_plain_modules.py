"""Models of transformers as they are, named in a job with their configuration: losses are those of a plain loop."""

from __future__ import annotations

import pytest
import torch

from tests.worker.actor.test_actor import job
from tests.worker.workers import Workers
from worker.data.sampler import BatchSampler
from worker.model.factory import build_model

LENGTH, WORDS = 12, 96


class Texts:
    """Samples as tokenised data sets give them; with `classes` the label is one of the text."""

    def __init__(self, classes: int = 0):
        self._classes = classes

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, object]:
        words = torch.Generator().manual_seed(index)
        ids = torch.randint(WORDS, (LENGTH,), generator=words)
        mask = (torch.arange(LENGTH) < LENGTH - index % 4).long()
        labels = index % self._classes if self._classes else torch.where(mask == 1, ids, -100)
        return {"input_ids": ids.tolist(), "attention_mask": mask, "labels": labels}


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": WORDS}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "gpt2": (
        "transformers:GPT2LMHeadModel",
        "transformers:GPT2Config",
        {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": WORDS, "n_positions": 16}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        0,
    ),
    "llama": (
        "transformers:AutoModelForCausalLM.from_config",
        "transformers:LlamaConfig",
        SMALL | {"intermediate_size": 48},
        0,
    ),
    "bert": (
        "transformers:BertForSequenceClassification",
        "transformers:BertConfig",
        SMALL | NO_DROPOUT | {"intermediate_size": 48, "num_labels": 3},
        3,
    ),
    "t5": (
        "transformers:T5ForConditionalGeneration",
        "transformers:T5Config",
        {"num_layers": 1, "d_model": 32, "d_ff": 48, "d_kv": 16, "num_heads": 2, "vocab_size": WORDS}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
        0,
    ),
}


def spec_of(name, *, loss, **layout):
    factory, config, arguments, classes = MODELS[name]
    spec = job("cosine", **layout)
    spec["model"] = {"factory": factory, "args": {"config": {"factory": config, "args": arguments}}}
    spec["data"] = {"factory": f"{__name__}:Texts", "args": {"classes": classes}}
    spec["optimizer"] |= {"factory": "torch.optim:SGD", "args": {"lr": 0.05}, "schedule": None}
    del spec["loss"]
    if loss is None:  # of unequal targets, as a loop that accumulates gradients takes it
        spec["training"] |= {"loss_reduction": "microbatches"}
    return spec | ({"loss": loss} if loss else {})


def plain_losses(spec, steps, loss_of):
    """Of a loop that calls the model as its library's own examples do."""
    training = spec["training"]
    model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=training["seed"])
    data, count = Texts(**spec["data"]["args"]), training["microbatches"]
    sampler = BatchSampler(len(data), training["global_batch"], count, seed=training["seed"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for step in steps:
        optimizer.zero_grad()
        losses = []
        for m in range(count):
            samples = [data[index] for index in sampler.indices(step, m)]
            batch = {key: torch.stack([torch.as_tensor(s[key]) for s in samples]) for key in samples[0]}
            loss = loss_of(model, batch)
            (loss / count).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), training["clip_grad_norm"])
        optimizer.step()
        found.append(sum(losses) / count)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "schedule"), [*((name, 2, "1f1b") for name in MODELS), ("gpt2", 4, "auto")]
)
def test_a_raw_model_trains_by_its_own_loss_as_in_a_plain_loop(name, stages, schedule):
    pytest.importorskip("transformers")
    spec = spec_of(name, loss=None, stages=stages, meshes=2)
    spec["pipeline"]["schedule"] = schedule
    expected = plain_losses(spec, range(1, 4), lambda model, batch: model(**batch).loss)
    with Workers(spec) as run:
        assert run.losses(range(1, 4)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_raw_classifier_trains_by_the_jobs_loss_on_its_logits():
    pytest.importorskip("transformers")
    cross_entropy = torch.nn.functional.cross_entropy
    spec = spec_of("bert", loss={"factory": "torch.nn:CrossEntropyLoss"}, stages=2, meshes=2)

    def loss_of(model, batch):
        labels = batch.pop("labels")
        return cross_entropy(model(**batch).logits, labels)

    expected = plain_losses(spec, range(1, 4), loss_of)
    with Workers(spec) as run:
        assert run.losses(range(1, 4)) == pytest.approx(expected, rel=1e-5)
