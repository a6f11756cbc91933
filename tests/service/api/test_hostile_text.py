"""Text that is legal in JSON and breaks what reads it later, in every place of a job and of a change."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from service.spec.job import JobSpec
from tests.service.api.conftest import Api, ApiMaker
from tests.service.conftest import job_body

JSON = {"Content-Type": "application/json"}
FACTORY = {"factory": "a:b", "args": {"inner": {"name": "text", "list": ["text"]}}}
WHOLE = job_body(
    model={**FACTORY, "output": "logits", "weights": "/w", "freeze": ["a*"]},
    data={
        **FACTORY,
        "split": "train",
        "columns": {"a": "b"},
        "collate": FACTORY,
    },
    loss=FACTORY,
    optimizer={**FACTORY, "schedule": FACTORY, "groups": [{"match": ["*.bias"], "lr": 1.0, "mode": "text"}]},
    pipeline={"stages": 2, "cut": ["a", "b"], "recompute": ["s0"], "schedule": "auto"},
    parallelism={"pp": 2, "tp": 2},
    resources={"tensor_plan": {"*.qkv": "colwise"}, "device": "cpu"},
    evaluation={"every_steps": 1, "data": FACTORY, "metric": "accuracy"},
    checkpoint={"uri": "/c"},
    code={"working_dir": "s3://a/b", "pip": ["einops"]},
    env={"A": "b"},
    secrets=["TOKEN"],
    queue="default",
    labels={"team": "nlp"},
    notifications=[{"url": "https://example.com", "secret": "KEY", "states": ["FAILED"]}],
)


def _spoilt(value: Any, text: str, whole: Any, replace) -> Iterator[Any]:
    """`whole` with `text` behind one string or name below `value`, for each of them."""
    places = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(places):
        if isinstance(key, str):
            renamed = copy.deepcopy(value)
            renamed[key + text] = renamed.pop(key)
            yield replace(renamed)

        def put(new: Any, key=key) -> Any:
            other = copy.deepcopy(value)
            other[key] = new
            return replace(other)

        if isinstance(inner, str):
            yield put(inner + text)
        elif isinstance(inner, dict | list):
            yield from _spoilt(inner, text, whole, put)


@pytest.mark.parametrize("text", ["\0", "\ud800"], ids=["NUL", "half a character"])
def test_no_place_of_a_job_takes_what_no_database_stores(text: str):
    JobSpec.model_validate(WHOLE)
    spoilt = list(_spoilt(WHOLE, text, WHOLE, lambda whole: whole))
    assert len(spoilt) > 100
    for body in spoilt:
        with pytest.raises(ValidationError):
            JobSpec.model_validate(body)


@pytest.mark.parametrize("text", ["\\u0000", "\\ud800"], ids=["NUL", "half a character"])
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": {"factory": "a:b", "groups": [{"match": ["a"], "?": 1}]}},
        {
            "parallelism": {"pp": 4, "tp": 2},
            "resources": {"device": "cpu", "tensor_plan": {"?": "colwise"}},
        },
    ],
    ids=["a group of parameters", "a tensor plan"],
)
async def test_one_job_does_not_end_the_metrics_of_all(api: Api, changes: dict, text: str):
    content = json.dumps(job_body(checkpoint={"uri": "/c"}, **changes)).replace("?", text)
    refused = await api.client.post("/api/v1/jobs", content=content, headers=JSON)
    assert refused.status_code == 422, refused.text
    assert (await api.client.get("/metrics")).status_code == 200


@pytest.mark.parametrize(
    "expression", ["a{99999999999}", "(" * 1500 + ")" * 1500], ids=["too large", "too deep"]
)
@pytest.mark.parametrize(
    ("place", "field"),
    [
        (lambda text: {"model": {"factory": "a:b", "freeze": [text]}}, "model.freeze.0"),
        (lambda text: {"optimizer": {"factory": "a:b", "groups": [{"match": [text], "lr": 1}]}}, "match.0"),
    ],
    ids=["freeze", "groups"],
)
async def test_an_expression_that_cannot_be_compiled_is_named(api: Api, place, field: str, expression: str):
    refused = await api.client.post("/api/v1/jobs", json=job_body(**place(f"re:{expression}")))
    assert refused.status_code == 422, refused.text
    (error,) = refused.json()["errors"]
    assert error["field"].endswith(field) and "no regular expression" in error["message"]


async def test_a_change_of_what_cannot_be_changed_names_it_whatever_it_is_called(api: Api):
    job_id = await api.submit()
    for name in ("\\ud800", "\\u0000", "labels"):
        refused = await api.client.patch(
            f"/api/v1/jobs/{job_id}", content=f'{{"{name}": 1}}'.encode(), headers=JSON
        )
        assert refused.status_code == 422, refused.text
        assert "cannot be changed: give queue, priority" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"pipeline": {"cut": 5}}, {"pipeline.cut"}),
        ({"pipeline": {"stages": 2, "cut": [1, "b"]}}, {"pipeline.cut", "pipeline.cut.0"}),
        ({"data": {"factory": "a:b", "columns": 5}}, {"data.columns"}),
        ({"resources": {"shard": ["all"]}}, {"resources.shard", "resources.shard.0"}),
    ],
    ids=["cut", "stages and cut", "columns", "shard"],
)
async def test_a_field_of_several_forms_is_named_as_it_is_written(
    make_api: ApiMaker, changes: dict, fields: set[str]
):
    async with make_api() as api:
        refused = await api.client.post("/api/v1/jobs", json=job_body(**changes))
    assert refused.status_code == 422
    assert {error["field"] for error in refused.json()["errors"]} == fields
