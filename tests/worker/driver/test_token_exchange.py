"""The driver's token: exchanged at its first call, whatever becomes of the answer."""

from __future__ import annotations

import json

import httpx
import pytest

from worker.driver.control_plane_client import ControlPlaneClient, Refused


class Plane:
    """Control plane of one attempt: `lost` answers to exchanges do not arrive; an old one has no such route."""

    def __init__(self, *, lost: int = 0, old: bool = False, token: str = "shown"):
        self.token, self.lost, self.old = token, lost, old

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/token") and self.old:
            return httpx.Response(404, json={"detail": "there is no such route"})
        if request.headers["Authorization"] != f"Bearer {self.token}":
            return httpx.Response(401, json={"detail": "the attempt's token is needed"})
        if request.url.path.endswith("/token"):
            self.token = json.loads(request.content)["token"]
            if self.lost:
                self.lost -= 1
                raise httpx.ReadError("the connection broke")
            return httpx.Response(204)
        return httpx.Response(200, json={"job_id": "job"})

    def asked(self) -> dict[str, str]:
        control = ControlPlaneClient("http://localhost:1", "job-1", "shown")
        headers = control._client.headers
        control._client = httpx.Client(
            base_url="http://localhost:1", headers=headers, transport=httpx.MockTransport(self.answer)
        )
        return control.attempt()


@pytest.mark.parametrize("lost", [0, 1])
def test_the_first_call_leaves_a_token_that_only_the_driver_has(lost: int):
    plane = Plane(lost=lost)
    assert plane.asked() == {"job_id": "job"}
    assert plane.token != "shown" and len(plane.token) >= 32


def test_under_an_older_control_plane_the_token_stays():
    plane = Plane(old=True)
    assert plane.asked() == {"job_id": "job"} and plane.token == "shown"


def test_a_driver_whose_token_somebody_else_has_exchanged_is_refused():
    with pytest.raises(Refused) as refused:
        Plane(token="another").asked()
    assert refused.value.status == 401
