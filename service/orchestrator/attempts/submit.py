"""Submits an attempt's driver to Ray: entrypoint, environment, secrets check, user code.

Repeating it after a lost answer is safe: the submission id is the attempt's. Just before, the store is asked,
through the fenced session, whether the attempt is still wanted; what freezes between that and Ray starts no second
driver (Ray knows the id) and none that trains (the control plane refuses its first call). Secrets are not put into
the environment, which Ray shows: drivers ask for them.
"""

from __future__ import annotations

import time

from service.observability.tracing import attempt_context, exporting
from service.orchestrator.attempts.admit import explain_waits
from service.orchestrator.decisions.attempt_lifecycle import EndAttempt, Wait
from service.orchestrator.ray.clusters import Clusters, NamedCluster, working_dir_uri
from service.orchestrator.ray.jobs_api import ClusterError, ClusterUnreachableError, RayJobSubmission
from service.settings.settings import Settings
from service.spec.job import stored_field
from service.spec.states import AttemptState
from service.store.attempts import find_attempt
from service.store.database import Sessions, utc_now
from service.store.jobs import find_job, is_current
from service.store.secrets import (
    MissingSecretError,
    NoSecretsKeyError,
    SecretBox,
    open_secrets,
    spec_environment,
    spec_secret_names,
)
from service.store.spans import record_submission_span
from service.store.tables import AttemptRow, JobRow
from service.store.transitions import lock_job
from worker.contract.reasons import Reason

_NOT_YET_SUBMITTED = Reason.WAITS_FOR_CLUSTER


class Submitter:
    """Submits attempts to Ray, each to its own cluster."""

    def __init__(self, settings: Settings, database: Sessions, clusters: Clusters) -> None:
        self._settings, self._database, self._clusters = settings, database, clusters

    async def submit(self, attempt: AttemptRow, job: JobRow) -> EndAttempt | None:
        """Start the driver; returns the end of an attempt that Ray refuses.

        Where the cluster cannot be reached, the job gets a message and the next round tries again.
        """
        began_at = time.time()
        cluster = self._clusters.of(attempt.cluster)
        try:
            submission = await self._submission(attempt, cluster)
            if not await self._is_wanted(attempt.id):
                return None
            await cluster.ray.submit(submission)
        except (MissingSecretError, NoSecretsKeyError) as error:
            return EndAttempt(AttemptState.FAILED, Reason.SECRET_MISSING, str(error))
        except ClusterUnreachableError as error:
            wait = Wait(job.id, _NOT_YET_SUBMITTED, f"not started yet: {error}")
            await explain_waits(self._database, [(job, wait)])
            return None
        except ClusterError as error:
            return EndAttempt(AttemptState.FAILED, Reason.START_REFUSED, str(error))
        record_submission_span(job, attempt, began_at, time.time())
        async with self._database.write() as session:
            # before its attempt is written, as a driver's report does: the other way round the two wait for each other
            starting = await lock_job(session, job.id)
            fresh = await find_attempt(session, attempt.id)
            if fresh is not None and fresh.submitted_at is None:
                fresh.submitted_at = utc_now()
            if starting is not None and starting.reason == _NOT_YET_SUBMITTED:
                starting.reason = starting.message = None
        return None

    async def _is_wanted(self, attempt_id: str) -> bool:
        async with self._database.write() as session:
            fresh = await find_attempt(session, attempt_id)
            if fresh is None or fresh.attempt_state.final:
                return False
            return await is_current(session, fresh)

    async def _submission(self, attempt: AttemptRow, cluster: NamedCluster) -> RayJobSubmission:
        async with self._database.read() as session:  # rounds leave the specification out
            job = await find_job(session, attempt.job_id)
            assert job is not None, attempt.job_id
            if names := spec_secret_names(job.spec):
                # checked only: the driver asks for them, since Ray shows a driver's environment
                await open_secrets(session, SecretBox.of(self._settings), job.owner, names)
        pip = tuple(stored_field(job.spec, "code", "pip", []))
        return RayJobSubmission(
            id=attempt.id,
            entrypoint=cluster.drivers.entrypoint("worker.driver", pip=pip),
            interpreter=cluster.drivers.interpreter(pip),
            env=spec_environment(job.spec)
            | cluster.drivers.ray_environment
            | {
                "SLOTLINE_CONTROL_URL": cluster.drivers.url or self._settings.control_url,
                "SLOTLINE_ATTEMPT_ID": attempt.id,
                "SLOTLINE_ATTEMPT_TOKEN": attempt.token,
                "SLOTLINE_PROFILE_EVERY_S": f"{self._settings.profile_every_s:g}",
                "SLOTLINE_METRICS_PORTS": self._settings.metrics_ports,
                "SLOTLINE_WORKERS_PER_GPU": str(cluster.drivers.workers_per_gpu),
                "SLOTLINE_LOG_FORMAT": self._settings.log_format,
                **_trace_env(job, attempt),
            },
            metadata={"slotline_job": job.id, "slotline_attempt": str(attempt.number)},
            working_dir=await working_dir_uri(self._database, job.spec, cluster),
            pip=pip,
        )


def _trace_env(job: JobRow, attempt: AttemptRow) -> dict[str, str]:
    """The attempt's span, the parent of its driver's spans, and the request to report spans, where some are exported."""
    context = attempt_context(job.traceparent, attempt.id)
    if context is None:
        return {}
    return {"SLOTLINE_TRACEPARENT": str(context)} | ({"SLOTLINE_SPANS": "1"} if exporting() else {})
