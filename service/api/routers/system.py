"""Routes of the server itself, open to everyone as probes need: health, readiness and version; and its metrics."""

from __future__ import annotations

import asyncio
from importlib.metadata import version

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from service.api.auth import is_scraper
from service.api.dependencies import CurrentService
from service.api.errors import responses
from service.api.metrics import scrape
from service.jobs.problems import ProblemError
from service.jobs.service import Service
from service.schemas.system import Health, LoginIssuer, Readiness, Version

router = APIRouter(tags=["system"])
_READY_LIMIT_S = 5.0


@router.get("/healthz")
async def read_health() -> Health:
    """The process serves."""
    return Health(status="ok")


@router.get("/readyz", responses=responses(503), response_model_exclude_defaults=True)
async def read_readiness(service: CurrentService) -> Readiness:
    """The database answers and takes writes, the orchestrator's rounds turn, and a cluster answers; others are named."""
    await _check_database(service)
    if (problem := service.problem()) is not None:
        raise ProblemError(503, problem)
    return Readiness(status="ok", clusters_away=_clusters_away(service))


@router.get("/api/v1/version")
async def read_version(service: CurrentService) -> Version:
    """The version of Slotline and of the API, and where users log in."""
    issuer, client_id = service.settings.oidc_issuer, service.settings.oidc_audience
    login = LoginIssuer(issuer=issuer, client_id=client_id) if issuer and client_id else None
    return Version(version=version("slotline"), api="v1", login=login)


@router.get("/metrics", include_in_schema=False)
async def read_metrics(request: Request, service: CurrentService) -> Response:
    """The metrics in Prometheus's text format; without a token that lists drivers, of no job in a project of its own."""
    whole = await is_scraper(request, service)
    return Response(await scrape(service, whole=whole), media_type=CONTENT_TYPE_LATEST)


async def _check_database(service: Service) -> None:
    try:
        async with asyncio.timeout(_READY_LIMIT_S), service.database.read() as session:
            await session.execute(text("SELECT 1"))
    except (SQLAlchemyError, OSError, TimeoutError) as error:
        raise ProblemError(503, f"the database does not answer: {type(error).__name__}") from None


def _clusters_away(service: Service) -> dict[str, str]:
    """Clusters that do not answer, with their errors; 503 where none of all answers."""
    away = {
        cluster.name: error
        for cluster in service.clusters
        if (error := cluster.watcher.snapshot.error) is not None
    }
    if len(away) == len(service.clusters):
        named = [f"{name}: {error}" for name, error in away.items()]
        several = "no cluster is there: " + "; ".join(named)
        raise ProblemError(
            503, several if len(named) > 1 else f"the cluster is not there: {next(iter(away.values()))}"
        )
    return away
