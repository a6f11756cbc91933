"""Drivers of other versions: those that this control plane would misread are refused, and their attempts end by name."""

from __future__ import annotations

from fastapi import Request

from service.api.auth import DriverAttempt
from service.api.context import Current
from service.api.errors import ProblemError
from service.api.problem_codes import Code
from service.job_states import AttemptState
from service.orchestrator.outcome import check_current, end_attempt
from service.store.attempts import lock_attempt
from service.store.database import utc_now
from worker.protocol import HEADER, driver_is_too_old
from worker.reasons import Reason


async def understood(attempt: DriverAttempt, request: Request, service: Current) -> None:
    """Raise 409 for a driver that is too old. It hears that nobody wants its attempt, and the job why that ended."""
    refusal = driver_is_too_old(request.headers.get(HEADER))
    if refusal is None:
        return
    async with service.database.write() as session:
        fresh, job = await lock_attempt(session, attempt.id)
        check_current(job, fresh)
        await end_attempt(
            session,
            job,
            fresh,
            AttemptState.FAILED,
            reason=Reason.VERSION_MISMATCH,
            message=refusal,
            at=utc_now(),
            backoff=service.backoff,
        )
    service.wake()
    raise ProblemError(409, refusal, code=Code.VERSION_MISMATCH)
