"""HTTP client for the control plane's routes of one attempt, authenticated by the attempt's token.

Calls are retried with growing pauses while the control plane is unreachable or answers 5xx; a 4xx raises Refused.
Knows nothing of training and nothing of Ray; the bodies of reports are made in reporter.py.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import tenacity

from worker.contract.logs import SecretMask
from worker.contract.versions import PROTOCOL, PROTOCOL_HEADER

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 30.0
PLAN_TIMEOUT_S = 370.0  # where the control plane names no other
_RETRIED_STATUSES = (408, 425, 429)
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


class Refused(RuntimeError):
    """The control plane refused a request; `status` is the HTTP status, `code` the problem's, where it has one."""

    def __init__(self, status: int, detail: str, code: str | None = None):
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.code = code

    @property
    def final(self) -> bool:
        """True where the control plane accepts no more reports of this attempt."""
        return self.status in (401, 409)


class ControlPlaneClient:
    """The routes of one attempt.

    Every call is tried again with growing pauses while the control plane cannot be reached or
    answers 5xx, for `patience_s`; a 4xx raises Refused with the problem's detail.
    """

    def __init__(
        self,
        url: str,
        attempt_id: str,
        token: str,
        *,
        patience_s: float = 600.0,
        mask: SecretMask | None = None,
        traceparent: str | None = None,
    ):
        self._client = httpx.Client(
            base_url=f"{url.rstrip('/')}/api/v1/attempts/{attempt_id}",
            headers={
                "Authorization": f"Bearer {token}",
                PROTOCOL_HEADER: str(PROTOCOL),
                **({"traceparent": traceparent} if traceparent else {}),
            },
            timeout=REQUEST_TIMEOUT_S,
            trust_env=httpx.URL(url).host not in _LOOPBACK_HOSTS,  # a proxy is for other hosts
        )
        self._patience_s = patience_s
        self._plan_timeout_s = PLAN_TIMEOUT_S
        self._mask = mask or SecretMask()

    def attempt(self) -> dict[str, Any]:
        """The attempt with its job, asked for once: `attempt_id`, `job_id`, `number`, `job`, `device`."""
        self._exchange_token()
        body = self._patiently("GET", "")
        self._plan_timeout_s = body.get("plan_timeout_s") or PLAN_TIMEOUT_S
        return body

    def _exchange_token(self) -> None:
        """Exchange the environment's token, which Ray's API shows to other jobs, for one that only this process has."""
        token = secrets.token_urlsafe(32)
        try:
            self._patiently("POST", "/token", json={"token": token})
        except Refused as refused:
            if refused.status in (404, 405):  # a control plane of before there was an exchange
                return
            # 401: the answer was lost and this is the second try; were it not, the next call is refused
            if refused.status != 401:
                raise
        self._client.headers["Authorization"] = f"Bearer {token}"

    def cached_profile(self, key: str) -> dict[str, Any] | None:
        """The layer profile stored under `key`, or None."""
        try:
            return self._patiently("GET", "/profile", params={"key": key})
        except Refused as refused:
            if refused.status == 404:
                return None
            raise

    def store_profile(self, key: str, profile: Mapping[str, Any]) -> None:
        self._patiently("PUT", "/profile", params={"key": key}, json=profile)

    def place(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """`workers`, the node of each worker by mesh, or `refused` and `final`; None from a control plane of before there
        were placements."""
        try:
            return self._patiently("POST", "/placement", json=request)
        except Refused as refused:
            if refused.status in (404, 405):
                return None
            raise

    def plan(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """`begins`, `spec` and `plan` for a profile, the measured network and the placed workers."""
        return self._patiently("POST", "/plan", json=request, timeout=self._plan_timeout_s)

    def replan(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A shorter plan of the running attempt in `found`, or `why` there is none; one try. Raises httpx.HTTPError and
        Refused."""
        return self._once("POST", "/replan", json=request, timeout=self._plan_timeout_s)

    def plan_steps(self, steps: Sequence[Sequence[int]]) -> list[dict[str, Any] | None]:
        """The plans of single steps by the buckets of their microbatches; None where the job's own is as short. One try.
        Raises httpx.HTTPError and Refused."""
        request = {"buckets": [list(bucket_of) for bucket_of in steps]}
        return self._once("POST", "/step-plans", json=request, timeout=self._plan_timeout_s)["plans"]

    def plan_forwards(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """The plan of an evaluation: of a PipelineSpec of forwards only."""
        return self._patiently("POST", "/forward-plan", json=spec, timeout=self._plan_timeout_s)

    def report(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send one report, one try. Raises httpx.HTTPError when it should be sent again, else Refused."""
        return self._once("POST", "/reports", json=body)

    def close(self) -> None:
        self._client.close()

    def _patiently(self, method: str, path: str, **kwargs: Any) -> Any:
        retry = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(httpx.HTTPError),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=10.0),
            stop=tenacity.stop_after_delay(self._patience_s),
            before_sleep=tenacity.before_sleep_log(log, logging.WARNING),
            reraise=True,
        )
        return retry(self._once, method, path, **kwargs)

    def _once(self, method: str, path: str, **kwargs: Any) -> Any:
        if "json" in kwargs:
            kwargs["json"] = self._mask.json(kwargs["json"])
        try:
            response = self._client.request(method, path, **kwargs)
        except ValueError:  # a number or a text that JSON cannot carry
            if "json" not in kwargs:
                raise
            response = self._client.request(method, path, **{**kwargs, "json": _json_safe(kwargs["json"])})
        if not response.is_success and (
            not response.is_client_error or response.status_code in _RETRIED_STATUSES
        ):
            response.raise_for_status()
        if response.is_error:
            raise Refused(response.status_code, *_problem(response))
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError:
            raise httpx.DecodingError(
                f"{response.url} answered {response.status_code} without JSON: is a proxy in between?",
                request=response.request,
            ) from None


def _json_safe(value: Any) -> Any:
    """The same with null for NaN and infinity, and marks for characters that UTF-8 cannot carry."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {_json_safe(key): _json_safe(entry) for key, entry in value.items()}
    return [_json_safe(entry) for entry in value] if isinstance(value, list | tuple) else value


def _problem(response: httpx.Response) -> tuple[str, str | None]:
    """(detail, code) of a refusal."""
    try:
        problem = response.json()
    except ValueError:
        return f"HTTP {response.status_code}: {response.text[:500]}", None
    if not isinstance(problem, dict):
        return f"HTTP {response.status_code}: {problem}", None
    return str(problem.get("detail") or problem.get("title") or problem), problem.get("code")
