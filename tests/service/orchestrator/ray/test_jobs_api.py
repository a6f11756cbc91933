"""What Ray's answers mean, by Ray's own words (2.60): a refusal, or only not now."""

from __future__ import annotations

import httpx
import pytest

from service.orchestrator.ray.jobs_api import (
    ClusterError,
    ClusterUnreachableError,
    RayCluster,
    RayJobSubmission,
)

SUBMISSION = RayJobSubmission("job-1", "python -m worker.driver", {}, {})


def cluster(answer: httpx.Response, *, known: bool = False) -> RayCluster:
    """A Ray that gives `answer` to a submission and knows the job afterwards or not."""

    def respond(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            return answer
        return httpx.Response(200, json={"status": "RUNNING"}) if known else httpx.Response(404)

    made = RayCluster("http://ray")
    made._client = httpx.AsyncClient(base_url="http://ray", transport=httpx.MockTransport(respond))
    return made


@pytest.mark.parametrize(
    "text",
    [
        "No available agent to submit job, please try again later.",
        "Traceback (most recent call last):\n  ...\naiohttp.client_exceptions.ClientConnectorError: Cannot connect",
    ],
)
async def test_a_head_without_its_agent_is_not_there_yet(text: str):
    with pytest.raises(ClusterUnreachableError, match="now"):
        await cluster(httpx.Response(500, text=text)).submit(SUBMISSION)


@pytest.mark.parametrize("status", [400, 500])
async def test_any_other_failure_is_a_refusal_in_rays_last_words(status: int):
    with pytest.raises(ClusterError, match="refused the attempt: ValueError: no such thing") as caught:
        await cluster(httpx.Response(status, text="Traceback\nValueError: no such thing\n")).submit(
            SUBMISSION
        )
    assert not isinstance(caught.value, ClusterUnreachableError)


async def test_a_submission_that_ray_has_already_is_a_success():
    await cluster(httpx.Response(500, text="already exists"), known=True).submit(SUBMISSION)
