"""A job's variables and secrets reach the user's code in real workers, and nothing shows the secrets."""

from __future__ import annotations

import hashlib

import httpx
import pytest

from tests.end_to_end.conftest import job_spec

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
SECRET = "hunter2-and-more"


def test_workers_have_the_variables_and_secrets_and_nothing_shows_a_secret(server, ray_head):
    kind = {"Content-Type": "text/plain"}
    server.client.put("/api/v1/secrets/TELLING_SECRET", content=SECRET, headers=kind).raise_for_status()
    job_id = server.submit(
        job_spec(
            "gpt-telling",
            data={"factory": "tests.end_to_end.telling:Tells"},
            env={"TELLING_HOME": "/shared/home"},
            secrets=["TELLING_SECRET"],
        )
    )
    job = server.wait(job_id)
    assert (job["state"], job["reason"]) == ("FAILED", "DATA_FAILED"), job
    assert "told *** with digest" in job["message"]
    assert hashlib.sha256(SECRET.encode()).hexdigest() in job["message"], "the worker had another value"
    assert "home /shared/home" in job["message"]
    shown = [
        server.client.get(f"/api/v1/jobs/{job_id}{part}").text for part in ("", "/events", "/logs", "/steps")
    ]
    assert "RuntimeError: told *** with digest" in shown[2], "the driver logs what failed"
    headers = {"Authorization": f"Bearer {ray_head.token}"}
    ray = httpx.get(f"{ray_head.address}/api/jobs/{job_id}-1", headers=headers, timeout=60)
    assert "/shared/home" in ray.raise_for_status().text
    assert [text for text in (*shown, ray.text, server.log.read_text()) if SECRET in text] == []
