"""Routes for health, readiness and version, open to everyone, as probes need."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from fastapi import APIRouter
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from service.api.dependencies import CurrentService
from service.api.errors import ProblemError, responses
from service.schemas.jobs import Health, Readiness, Version

router = APIRouter(tags=["system"])
_READY_LIMIT_S = 5.0


@router.get("/healthz")
async def read_health() -> Health:
    """The process serves."""
    return Health(status="ok")


@router.get("/readyz", responses=responses(503), response_model_exclude_defaults=True)
async def read_readiness(service: CurrentService) -> Readiness:
    """The database answers and takes writes, the orchestrator's rounds turn, the cluster answers: of several at least
    one; those that do not are named."""
    try:
        async with asyncio.timeout(_READY_LIMIT_S), service.database.read() as session:
            await session.execute(text("SELECT 1"))
    except (SQLAlchemyError, OSError, TimeoutError) as error:
        raise ProblemError(503, f"the database does not answer: {type(error).__name__}") from None
    if (problem := service.problem()) is not None:
        raise ProblemError(503, problem)
    away = {one.name: error for one in service.clusters if (error := one.watcher.snapshot.error) is not None}
    if len(away) == len(service.clusters):
        named = [f"{name}: {error}" for name, error in away.items()]
        several = "no cluster is there: " + "; ".join(named)
        raise ProblemError(
            503, several if len(named) > 1 else f"the cluster is not there: {next(iter(away.values()))}"
        )
    return Readiness(status="ok", clusters_away=away)


@router.get("/api/v1/version")
async def read_version() -> Version:
    """Which Slotline this is."""
    return Version(version=version("slotline"), api="v1")
