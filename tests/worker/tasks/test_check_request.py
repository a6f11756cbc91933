"""A check takes its job from the environment, where Ray starts it, or from standard input."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest

from tests.worker.actor.test_actor import job
from worker.contract.job import Job
from worker.contract.tasks import CHECK_REQUEST_VARIABLE
from worker.tasks.check import requested_job


def test_the_environment_comes_before_standard_input_and_is_not_handed_on(monkeypatch: pytest.MonkeyPatch):
    first, second = job("cosine"), job("cosine", meshes=1, stages=1)
    monkeypatch.setenv(CHECK_REQUEST_VARIABLE, json.dumps({"job": first}))
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"job": second})))
    assert requested_job() == Job.from_json(first)
    assert CHECK_REQUEST_VARIABLE not in os.environ
    assert requested_job() == Job.from_json(second) != Job.from_json(first)
