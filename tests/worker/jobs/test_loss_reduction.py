"""With `loss_reduction: tokens` a batch in unequal microbatches trains as the whole batch at once."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from service.spec.job import JobSpec
from tests.tiers import some_by_day
from tests.worker.actor.test_actor import job
from tests.worker.workers import Workers
from worker.data.sampler import BatchSampler
from worker.model.factory import build_model

LENGTH, IGNORED = 8, 7


class Texts:
    """Windows of which a different part is a target; of one in four nothing is."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        tokens = torch.randint(10, 200, (LENGTH,), generator=draw)
        length = 0 if index % 4 == 3 else 1 + index % LENGTH
        return tokens, torch.where(torch.arange(LENGTH) < length, tokens, IGNORED)


def spec_of(**layout):
    spec = job(**layout)
    spec["data"] = {"factory": f"{__name__}:Texts"}
    spec["loss"] = {"factory": "torch.nn:CrossEntropyLoss", "args": {"ignore_index": IGNORED}}
    spec["training"] |= {"microbatches": 4, "loss_reduction": "tokens"}
    return spec


def whole_batch_losses(spec, steps):
    """Of a loop that runs each batch at once."""
    training = spec["training"]
    model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=training["seed"])
    data, optimizer = Texts(), torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = BatchSampler(len(data), training["global_batch"], 1, seed=training["seed"])
    found = []
    for step in steps:
        samples = [data[index] for index in sampler.indices(step, 0)]
        tokens, target = (torch.stack(column) for column in zip(*samples, strict=True))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens), target, ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training["clip_grad_norm"])
        optimizer.step()
        found.append(loss.item())
    return found


@some_by_day("layout", [{}, {"workers_per_mesh": 2}, {"stages": 1, "meshes": 1}], by_day=1, ids=str)
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_microbatches_of_unequal_tokens_train_as_the_whole_batch(layout, recompute):
    spec = spec_of(**layout)
    spec["pipeline"]["recompute"] = recompute
    expected = whole_batch_losses(spec, range(1, 5))
    with Workers(spec) as run:
        assert run.losses(range(1, 5)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (None, "tells no targets to count: give `loss`"),
        ({"factory": "torch.nn:CrossEntropyLoss", "args": {"reduction": "sum"}}, "is 'sum': leave it out"),
    ],
)
def test_what_cannot_be_weighed_is_refused(loss, message):
    spec = spec_of() | {"loss": loss}
    with pytest.raises(ValidationError, match=message):
        JobSpec.model_validate(spec)
