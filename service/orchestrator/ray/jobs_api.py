"""Cluster: the interface to a Ray cluster, and RayCluster, its implementation over Ray's HTTP API.

Plain HTTP with timeouts instead of Ray's own client, which has none, needs a thread per call and imports all of Ray
into the control plane. Submitting an id that Ray knows starts nothing twice. Nothing here touches the database.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState

_AGENT_UNAVAILABLE_MARKS = ("No available agent", "ClientConnectorError", "ServerDisconnectedError")
"""Parts of the text that Ray's head answers (with status 500) while the agent of its node is not there."""
_LOG_TAIL_BYTES = 16 << 20
_FOLLOW_READ_TIMEOUT_S = 120.0
"""Longest silence of a followed log: a connection that is gone is silent too."""


class ClusterError(Exception):
    """A call to the cluster failed: it is away, or it refused. The message says which."""


class ClusterUnreachableError(ClusterError):
    """The cluster did not answer: the call may have taken effect or not."""


@dataclass(frozen=True)
class RayNode:
    """A living node and its resources, by Ray resource name."""

    id: str
    address: str
    resources: Mapping[str, float]


@dataclass(frozen=True)
class ResourceUse:
    """Resources in use, by Ray resource name; `name` is the placement group's, and empty for an actor outside of one."""

    name: str
    resources: Mapping[str, float]


@dataclass(frozen=True)
class RayJobSubmission:
    """A Ray job to start: `env` are its environment variables, `resources` (by Ray's names) its entrypoint's own."""

    id: str
    entrypoint: str
    env: Mapping[str, str]
    metadata: Mapping[str, str]
    working_dir: str | None = None
    pip: tuple[str, ...] = ()
    resources: Mapping[str, float] = field(default_factory=dict)


class Cluster(Protocol):
    """Interface to a Ray cluster. Every call may raise ClusterError."""

    async def submit(self, submission: RayJobSubmission) -> None:
        """Start a driver; a submission id that Ray knows already is not started twice."""

    async def job(self, submission_id: str) -> RayJob: ...

    async def stop(self, submission_id: str) -> None:
        """Ask Ray to end a driver: SIGTERM, then SIGKILL. No error for an unknown or ended one."""

    async def log(self, submission_id: str) -> str:
        """The last 16 MiB of a driver's output; empty where there is none."""

    def read_log(self, submission_id: str, *, follow: bool = False) -> AsyncIterator[bytes]:
        """The output of a driver in pieces; with `follow` also its output from now on."""

    async def nodes(self) -> list[RayNode]: ...

    async def resources_in_use(self) -> list[ResourceUse]:
        """Resources that placement groups, and actors outside of them, hold now."""

    async def upload_package(self, name: str, content: bytes) -> str:
        """Make a zip available to drivers and return the URI for `working_dir`."""

    async def close(self) -> None: ...


class RayCluster:
    """A Ray cluster by the address of its dashboard, e.g. http://head:8265; `token_setting` names the token in messages."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 20.0,
        token: str | None = None,
        token_setting: str = "RAY_AUTH_TOKEN",
    ) -> None:
        self._token_setting = token_setting
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.address, self._timeout_s = address, timeout_s
        self._client = httpx.AsyncClient(
            base_url=address, timeout=timeout_s, headers=headers, trust_env=False
        )

    async def submit(self, submission: RayJobSubmission) -> None:
        environment: dict[str, Any] = {"env_vars": dict(submission.env)}
        if submission.working_dir is not None:
            environment["working_dir"] = submission.working_dir
        if submission.pip:
            environment["pip"] = list(submission.pip)
        body = {
            "submission_id": submission.id,
            "entrypoint": submission.entrypoint,
            "runtime_env": environment,
            "metadata": dict(submission.metadata),
            "entrypoint_num_cpus": 0,
        }
        others = {name: amount for name, amount in submission.resources.items() if name != "GPU"}
        if others:
            body["entrypoint_resources"] = others
        if "GPU" in submission.resources:
            body["entrypoint_num_gpus"] = submission.resources["GPU"]
        response = await self._call("POST", "/api/jobs/", json=body, accept=(400, 500))
        if response.is_success:
            return
        if (await self.job(submission.id)).state is not RayState.MISSING:
            return
        if any(word in response.text for word in _AGENT_UNAVAILABLE_MARKS):
            raise ClusterUnreachableError(f"Ray cannot take the driver now: {_error_text(response)}")
        raise ClusterError(f"Ray refused the attempt: {_error_text(response)}")

    async def job(self, submission_id: str) -> RayJob:
        response = await self._call("GET", f"/api/jobs/{submission_id}", accept=(404,))
        if response.status_code == 404:
            return RayJob(RayState.MISSING)
        body = response.json()
        return RayJob(RayState(body["status"]), body.get("message"), body.get("driver_exit_code"))

    async def stop(self, submission_id: str) -> None:
        await self._call("POST", f"/api/jobs/{submission_id}/stop", accept=(400, 404, 500))

    async def log(self, submission_id: str) -> str:
        text = bytearray()
        async for piece in self.read_log(submission_id):
            text += piece
            del text[:-_LOG_TAIL_BYTES]
        return text.decode("utf-8", "replace")

    async def read_log(self, submission_id: str, *, follow: bool = False) -> AsyncIterator[bytes]:
        # Not the route of the Jobs API, which answers with the whole log in one JSON text.
        response = await self._call("GET", f"/api/jobs/{submission_id}", accept=(404,))
        node = None if response.status_code == 404 else response.json().get("driver_node_id")
        if node is None:
            return  # unknown, or not started: nothing was printed
        path = f"/api/v0/logs/{'stream' if follow else 'file'}"
        wanted = {"node_id": node, "filename": f"job-driver-{submission_id}.log", "lines": "-1"}
        timeout = httpx.Timeout(self._timeout_s, read=_FOLLOW_READ_TIMEOUT_S if follow else self._timeout_s)
        try:
            async with self._client.stream("GET", path, params=wanted, timeout=timeout) as response:
                if not response.is_success:
                    await response.aread()
                    if "not found" in response.text or "No such file" in response.text:
                        return
                    raise ClusterUnreachableError(
                        f"Ray at {self.address} does not give out the log: {_error_text(response)}"
                    )
                async for (
                    piece
                ) in response.aiter_bytes():  # no chunk size, which would wait until it is reached
                    yield piece
        except httpx.HTTPError as error:
            raise ClusterUnreachableError(
                f"Ray at {self.address} does not give out the log: {error or type(error).__name__}"
            ) from error

    async def nodes(self) -> list[RayNode]:
        response = await self._call("GET", "/api/v0/nodes", params={"detail": "1", "limit": "10000"})
        rows = response.json()["data"]["result"]["result"]
        return [
            RayNode(id=row["node_id"], address=row["node_ip"], resources=row["resources_total"])
            for row in rows
            if row["state"] == "ALIVE"
        ]

    async def resources_in_use(self) -> list[ResourceUse]:
        groups = await self._list("placement_groups", "CREATED")
        actors = await self._list("actors", "ALIVE")
        return [
            ResourceUse(
                group.get("name") or "",
                _sum_resources(bundle["unit_resources"] for bundle in group["bundles"]),
            )
            for group in groups
        ] + [
            ResourceUse("", actor["required_resources"])
            for actor in actors
            if actor["required_resources"] and not actor["placement_group_id"]
        ]

    async def _list(self, kind: str, state: str) -> list[dict[str, Any]]:
        chosen = {"filter_keys": "state", "filter_predicates": "=", "filter_values": state}
        response = await self._call(
            "GET", f"/api/v0/{kind}", params={"detail": "1", "limit": "10000", **chosen}
        )
        return response.json()["data"]["result"]["result"]

    async def upload_package(self, name: str, content: bytes) -> str:
        path = f"/api/packages/gcs/{name}"
        if not (await self._call("GET", path, accept=(404,))).is_success:
            await self._call("PUT", path, content=content)
        return f"gcs://{name}"

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(
        self, method: str, path: str, *, accept: tuple[int, ...] = (), **kwargs: Any
    ) -> httpx.Response:
        """The response where it is a success or its status is in `accept`. Raises ClusterError otherwise."""
        try:
            response = await self._client.request(method, path, **kwargs)
        except httpx.HTTPError as error:
            raise ClusterUnreachableError(
                f"Ray at {self.address} does not answer: {error or type(error).__name__}"
            ) from error
        if response.is_success or response.status_code in accept:
            return response
        if response.status_code in (401, 403):
            raise ClusterError(
                f"Ray at {self.address} wants a token: set {self._token_setting} to the cluster's token"
            )
        if response.status_code >= 500:
            raise ClusterUnreachableError(f"Ray at {self.address} fails: {_error_text(response)}")
        raise ClusterError(f"Ray at {self.address} answered {response.status_code}: {_error_text(response)}")


def _sum_resources(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _error_text(response: httpx.Response) -> str:
    lines = [line for line in response.text.strip().splitlines() if line.strip()]
    return lines[-1][:500] if lines else f"status {response.status_code}"
