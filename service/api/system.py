"""Health, readiness and version; open to everyone, as probes need."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from fastapi import APIRouter
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from service.api.context import Current
from service.api.errors import ProblemError, responses
from service.api.schemas import Health, Version

router = APIRouter(tags=["system"])
_READY_LIMIT_S = 5.0


@router.get("/healthz")
async def healthy() -> Health:
    """The process serves."""
    return Health(status="ok")


@router.get("/readyz", responses=responses(503))
async def ready(service: Current) -> Health:
    """The database answers and takes writes, the orchestrator's rounds turn, the cluster answers."""
    try:
        async with asyncio.timeout(_READY_LIMIT_S), service.database.read() as session:
            await session.execute(text("SELECT 1"))
    except (SQLAlchemyError, OSError, TimeoutError) as error:
        raise ProblemError(503, f"the database does not answer: {type(error).__name__}") from None
    if (problem := service.problem()) is not None:
        raise ProblemError(503, problem)
    if service.cluster.snapshot.error is not None:
        raise ProblemError(503, f"the cluster is not there: {service.cluster.snapshot.error}")
    return Health(status="ok")


@router.get("/api/v1/version")
async def read_version() -> Version:
    """Which Slotline this is."""
    return Version(version=version("slotline"), api="v1")
