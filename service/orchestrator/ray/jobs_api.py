"""Cluster: the interface to a Ray cluster, and RayCluster, its implementation over Ray's HTTP API.

Plain HTTP with timeouts instead of Ray's own client, which has none, needs a thread per call and imports all of Ray
into the control plane. Submitting an id that Ray knows starts nothing twice. Nothing here touches the database.

All of Ray's routes stand here and in no other module. Those below /api/v0 and /api/packages, and the names of log files,
are not public, and any minor version may change them: tests/service/orchestrator/ray/test_ray_versions.py asks each
version of TESTED_RAY for all of it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from worker.contract.job import job_of_keeper

logger = logging.getLogger(__name__)
TESTED_RAY = ((2, 59), (2, 60))
"""Minor versions of Ray, ascending, with which all calls were tried. An older Ray is refused, a newer one told."""
_AGENT_UNAVAILABLE_MARKS = ("No available agent", "ClientConnectorError", "ServerDisconnectedError")
"""Parts of the text that Ray's head answers (with status 500) while the agent of its node is not there."""
CALL_TIMEOUT_S = 20.0
"""Limit of one call to Ray, whose head may be starting a hundred actors meanwhile."""
KUBERNETES_NODE_LABEL = "kubernetes.io/hostname"
_NODE_ID_LABEL = "ray.io/node-id"
_HEAD_RESOURCE = "node:__internal_head__"
_LOG_TAIL_BYTES = 16 << 20
_HOSTS_EVERY_S = 30.0
"""Pause before Ray is asked again for the host name of a node that it did not name for so long."""
_FOLLOW_READ_TIMEOUT_S = 120.0
"""Longest silence of a followed log: a connection that is gone is silent too."""


_FITTING = (
    "Slotline works with Ray "
    + " and ".join(f"{major}.{minor}" for major, minor in TESTED_RAY)
    + ": give its nodes one of these"
)


class ClusterError(Exception):
    """A call to the cluster failed: it is away, or it refused. The message says which."""


class ClusterUnreachableError(ClusterError):
    """The cluster did not answer: the call may have taken effect or not."""


@dataclass(frozen=True)
class RayNode:
    """A living node and its resources, by Ray resource name; `host` is its host name (of a pod: the pod's)."""

    id: str
    address: str
    resources: Mapping[str, float]
    host: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def kubernetes_node(self) -> str | None:
        """The Kubernetes node of a Ray pod that says so by a label, as those of our chart do."""
        return self.labels.get(KUBERNETES_NODE_LABEL) or None

    @property
    def is_head(self) -> bool:
        """True for the node of Ray's head, where entrypoints without resources run."""
        return _HEAD_RESOURCE in self.resources

    @property
    def name(self) -> str:
        """The operators' name of the node, whichever pod or raylet is there: Kubernetes node, else host, else address."""
        return self.kubernetes_node or self.host or self.address


@dataclass(frozen=True)
class ResourceUse:
    """Resources in use on one node, by Ray resource name; `name` is the placement group's, and of an actor outside of one
    empty, but for a keeper of copies, which has no resources."""

    name: str
    resources: Mapping[str, float]
    node_id: str = ""


@dataclass(frozen=True)
class RayJobSubmission:
    """A Ray job to start: `env` are its environment variables, `resources` (by Ray's names) its entrypoint's own, which
    does not run on the nodes `avoid` (Ray's ids). `interpreter` are the words of a shell with which Ray starts its own
    processes for the job; None: as it does by itself."""

    id: str
    entrypoint: str
    env: Mapping[str, str]
    metadata: Mapping[str, str]
    working_dir: str | None = None
    pip: tuple[str, ...] = ()
    resources: Mapping[str, float] = field(default_factory=dict)
    avoid: tuple[str, ...] = ()
    interpreter: str | None = None


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
        timeout_s: float = CALL_TIMEOUT_S,
        token: str | None = None,
        token_setting: str = "RAY_AUTH_TOKEN",
    ) -> None:
        self._token_setting = token_setting
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.address, self._timeout_s = address, timeout_s
        self._version: str | None = None
        self._hosts, self._hosts_asked_at = dict[str, str](), -math.inf
        self._unnamed_since: dict[str, float] = {}
        self._client = httpx.AsyncClient(
            base_url=address, timeout=timeout_s, headers=headers, trust_env=False
        )

    async def submit(self, submission: RayJobSubmission) -> None:
        environment: dict[str, Any] = {"env_vars": dict(submission.env)}
        if submission.working_dir is not None:
            environment["working_dir"] = submission.working_dir
        if submission.pip:
            environment["pip"] = list(submission.pip)
        if submission.interpreter is not None:
            environment["py_executable"] = submission.interpreter
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
        if submission.avoid:
            body["entrypoint_label_selector"] = {_NODE_ID_LABEL: f"!in({', '.join(submission.avoid)})"}
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
        with self._reads("a job"):
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
        """The living nodes, but those that are so new that Ray does not tell their names yet: what is decided of a node by
        its name holds whenever it is there."""
        await self._check_version()
        with self._reads("nodes"):
            alive = await self._list("nodes", "ALIVE")
            hosts = await self._host_names([row["node_id"] for row in alive])
            return [
                RayNode(
                    id=row["node_id"],
                    address=row["node_ip"],
                    resources=row["resources_total"],
                    host=hosts.get(row["node_id"], ""),
                    labels=row.get("labels") or {},
                )
                for row in alive
                if row["node_id"] in hosts or KUBERNETES_NODE_LABEL in (row.get("labels") or {})
            ]

    async def _host_names(self, node_ids: Sequence[str]) -> Mapping[str, str]:
        """Host names by node id, empty of nodes that Ray does not name for _HOSTS_EVERY_S; without those that are newer.
        Asked only when a node is new, as the answer is long."""
        now = time.monotonic()
        self._hosts = {node_id: self._hosts[node_id] for node_id in node_ids if node_id in self._hosts}
        self._unnamed_since = {
            node_id: self._unnamed_since.get(node_id, now)
            for node_id in node_ids
            if node_id not in self._hosts
        }
        late = {node_id for node_id, since in self._unnamed_since.items() if now - since >= _HOSTS_EVERY_S}
        if self._unnamed_since.keys() - late or (late and now - self._hosts_asked_at >= _HOSTS_EVERY_S):
            self._hosts_asked_at = now
            response = await self._call("GET", "/nodes", params={"view": "summary"}, accept=(404,))
            if not response.is_success:  # this Ray names no hosts
                late |= self._unnamed_since.keys()
            else:
                for row in response.json()["data"]["summary"]:
                    raylet = row.get("raylet") or {}
                    if host := raylet.get("nodeManagerHostname", ""):
                        self._hosts[raylet.get("nodeId", "")] = host
        return dict.fromkeys(late, "") | self._hosts

    async def resources_in_use(self) -> list[ResourceUse]:
        with self._reads("placement groups and actors"):
            return [
                ResourceUse(group.get("name") or "", _sum_resources(parts), node_id)
                for group in await self._list("placement_groups", "CREATED")
                for node_id, parts in _resources_by_node(group["bundles"]).items()
            ] + [
                ResourceUse(
                    actor["name"] if _is_keeper(actor) else "",
                    actor["required_resources"],
                    actor.get("node_id") or "",
                )
                for actor in await self._list("actors", "ALIVE")
                if (actor["required_resources"] or _is_keeper(actor)) and not actor["placement_group_id"]
            ]

    async def _list(self, kind: str, state: str) -> list[dict[str, Any]]:
        chosen = {"filter_keys": "state", "filter_predicates": "=", "filter_values": state}
        response = await self._call(
            "GET", f"/api/v0/{kind}", params={"detail": "1", "limit": "10000", **chosen}
        )
        return response.json()["data"]["result"]["result"]

    async def _check_version(self) -> None:
        """Raise ClusterError for a Ray that is older than those that were tried. Asked once a connection."""
        if self._version is not None:
            return
        with self._reads("version"):
            version = str((await self._call("GET", "/api/version")).json()["ray_version"])
        minor = re.match(r"(\d+)\.(\d+)", version)
        found = (int(minor[1]), int(minor[2])) if minor else TESTED_RAY[-1]
        if found < TESTED_RAY[0]:
            raise ClusterError(f"Ray at {self.address} is {version}: {_FITTING}")
        if found > TESTED_RAY[-1]:
            logger.warning("Ray at %s is %s, which nobody tried: %s", self.address, version, _FITTING)
        self._version = version

    @contextlib.contextmanager
    def _reads(self, what: str) -> Iterator[None]:
        """ClusterError for an answer of another form than the versions that were tried give."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ClusterError(
                f"Ray at {self.address} (version {self._version}) describes {what} in a way that is not understood "
                f"({type(error).__name__}: {error}): {_FITTING}"
            ) from error

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
            self._version = None  # another one may be started in its place
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


def _is_keeper(actor: Mapping[str, Any]) -> bool:
    return job_of_keeper(actor.get("name") or "") is not None


def _resources_by_node(bundles: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, float]]]:
    parts: dict[str, list[Mapping[str, float]]] = {}
    for bundle in bundles:
        parts.setdefault(bundle.get("node_id") or "", []).append(bundle["unit_resources"])
    return parts


def _sum_resources(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _error_text(response: httpx.Response) -> str:
    lines = [line for line in response.text.strip().splitlines() if line.strip()]
    return lines[-1][:500] if lines else f"status {response.status_code}"
