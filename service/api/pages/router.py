"""Serves the web pages: HTML shells with their script, style and icon, links to Grafana, and a job page's own JSON.

The pages fill themselves from the JSON API, and from four answers that only they need. Login and logout, style and
scripts are open to everyone (`open_router`).
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.responses import FileResponse, HTMLResponse
from fastapi.templating import Jinja2Templates

from service.api.auth import Caller
from service.api.dependencies import CurrentService, JobId
from service.api.sso import CALLBACK_PATH, SIGNED_ON, SignOnError, SingleSignOn, sso_of
from service.jobs import explain
from service.jobs.admin import read_projects
from service.jobs.problems import ProblemError
from service.schemas.jobs import Integer
from service.spec.names import JOB_ID_PATTERN
from service.spec.states import JobState
from service.store.jobs import find_job
from service.store.tables import JobRow

_HERE = Path(__file__).parent
_STATIC = {path.name: path for path in (_HERE / "static").iterdir() if path.suffix in (".js", ".css", ".svg")}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_NOT_STORED = {"Cache-Control": "no-store"}


def _user(request: Request) -> dict[str, Any]:
    return {"user": request.scope.get(SIGNED_ON)}


_templates = Jinja2Templates(directory=_HERE / "templates", context_processors=[_user])

router = APIRouter(include_in_schema=False)
open_router = APIRouter(include_in_schema=False)


@router.get("/", response_class=HTMLResponse)
async def jobs_page(request: Request, caller: Caller, service: CurrentService) -> HTMLResponse:
    """The list of jobs, with a choice of projects for who is in more than one."""
    projects = [project.name for project in (await read_projects(service, caller)).items]
    context = {"states": list(JobState), "queues": list(service.settings.queues), "projects": projects}
    return _templates.TemplateResponse(request, "jobs.html", context, headers=_HEADERS)


@router.get("/cluster", response_class=HTMLResponse)
async def cluster_page(request: Request) -> HTMLResponse:
    """Accelerators, queues, nodes, meshes, and why each job waits."""
    return _templates.TemplateResponse(request, "cluster.html", headers=_HEADERS)


@router.get("/compare", response_class=HTMLResponse)
async def compare_page(request: Request) -> HTMLResponse:
    """Two jobs beside each other: curves, and differences of their specifications."""
    return _templates.TemplateResponse(request, "compare.html", headers=_HEADERS)


@router.get("/docs", response_class=HTMLResponse)
async def docs_page(request: Request, service: CurrentService) -> HTMLResponse:
    """The reference of the API, whose calls can be tried out."""
    context = {"authenticates": service.settings.authenticates}
    # its renderer, openapi-explorer, gives single elements their style
    policy = f"{_HEADERS['Content-Security-Policy']}; style-src 'self' 'unsafe-inline'"
    headers = _HEADERS | {"Content-Security-Policy": policy}
    return _templates.TemplateResponse(request, "docs.html", context, headers=headers)


@router.get("/jobs/{job_id}", response_class=HTMLResponse)
async def job_page(request: Request, job_id: str, service: CurrentService) -> HTMLResponse:
    """The page of one job, or 404 and a page that says so."""
    async with service.database.read() as session:
        known = re.fullmatch(JOB_ID_PATTERN, job_id) and await find_job(session, job_id)
    page, status = ("job.html", 200) if known else ("missing.html", 404)
    links = dashboard_links(service.settings.grafana_url, known, at=time.time()) if known else {}
    return _templates.TemplateResponse(
        request, page, {"job_id": job_id, "dashboards": links}, status_code=status, headers=_HEADERS
    )


def is_for_a_reader(request: Request) -> bool:
    """True for a page that a browser asks for, and nothing of the API."""
    return "text/html" in request.headers.get("Accept", "") and not request.url.path.startswith("/api/")


def missing_page(request: Request) -> HTMLResponse:
    """404 as a page: nothing is at this address, or no job that the visitor sees."""
    context = {"path": request.url.path, "job_id": request.path_params.get("job_id")}
    return _templates.TemplateResponse(request, "missing.html", context, status_code=404, headers=_HEADERS)


def dashboard_links(grafana_url: str | None, job: JobRow, *, at: float) -> dict[str, str]:
    """Grafana's dashboards of a job by their names: its curves, and its last profiled step before `at`.

    The timeline's axis has a millisecond for each microsecond of the step; a date of 24 characters is never taken for
    something else.
    """
    if grafana_url is None:
        return {}
    chosen = {"var-name": job.name, "var-job": job.id}
    whole = datetime.fromtimestamp(max(0.001, job.step_s or 0.06) * 1000, UTC)
    axis = {"from": "1970-01-01T00:00:00.000Z", "to": f"{whole:%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z"}
    timeline = {**axis, **chosen, "var-at": f"{at:.0f}"}
    return {
        "Grafana": f"{grafana_url}/d/slotline-job?{urlencode(chosen)}",
        "Timeline in Grafana": f"{grafana_url}/d/slotline-timeline?{urlencode(timeline)}",
    }


@router.get("/jobs/{job_id}/profiled-steps")
async def steps(job_id: JobId, service: CurrentService) -> dict[str, Any]:
    """The attempt whose plan is stored (null: none), and of each stored timeline the step and the attempt; latest last."""
    return await explain.read_profiled_steps(service, job_id)


@router.get("/jobs/{job_id}/gaps")
async def gaps(job_id: JobId, service: CurrentService, step: Integer | None = None) -> dict[str, Any]:
    """The gaps of the planned and of the measured compute lanes of one step (the last profiled one if null)."""
    return await explain.read_gaps(service, job_id, step)


@router.get("/jobs/{job_id}/memory")
async def memory(job_id: JobId, service: CurrentService) -> dict[str, Any]:
    """The meshes of the job's plan: memory limit, planned and measured peak, and the stages that recompute."""
    return {"meshes": await explain.read_memory(service, job_id)}


@router.get("/jobs/{job_id}/choice")
async def choice(job_id: JobId, service: CurrentService) -> dict[str, Any]:
    """Microbatches, stages, step time and updates of the job's plan; null and empty where there is no plan yet."""
    return await explain.read_choice(service, job_id)


@open_router.get("/static/{name}")
async def static(name: str) -> FileResponse:
    """A script, a style sheet or an icon."""
    if name not in _STATIC:
        raise HTTPException(404, f"no file {name} belongs to the pages")
    return FileResponse(_STATIC[name], headers=_HEADERS)


async def _configured_sso(request: Request) -> SingleSignOn:
    if (sso := sso_of(request.app)) is None:
        raise HTTPException(
            404, "pages of this server do not log in: set SLOTLINE_OIDC_ISSUER, or send a token"
        )
    return sso


ConfiguredSso = Annotated[SingleSignOn, Depends(_configured_sso)]


@open_router.get("/login")
async def login(request: Request, sso: ConfiguredSso, next: str = "/") -> Response:
    """Lead a visitor to the identity provider, and back to the page `next` of this server."""
    response = _redirect("/")
    try:
        response.headers["Location"] = await sso.begin(request, next, response)
    except SignOnError as error:
        return _sign_on_page(request, error)
    return response


@open_router.get(CALLBACK_PATH)
async def finish_login(request: Request, sso: ConfiguredSso) -> Response:
    """The visitor comes back from the identity provider, and goes on as its user."""
    try:
        session, next_page = await sso.finish(request)
    except SignOnError as error:
        return _sign_on_page(request, error)
    response = _redirect(next_page)
    sso.keep(session, response)
    return response


@open_router.post("/login/renew")
async def renew_login(request: Request, sso: ConfiguredSso) -> Response:
    """Continue the session with a new ID token; 401 where its user must log in again, 404 where nobody is logged in."""
    _check_own_page(request, sso)
    try:
        session = await sso.renew(request)
    except SignOnError as error:
        raise ProblemError(error.status, str(error)) from None
    response = Response(status_code=204, headers=_NOT_STORED)
    sso.keep(session, response)
    return response


@open_router.post("/logout")
async def logout(request: Request, sso: ConfiguredSso) -> Response:
    """End the session in this browser."""
    _check_own_page(request, sso)
    response = _redirect("/logout")
    sso.end(response)
    return response


@open_router.get("/logout")
async def logged_out_page(request: Request, sso: ConfiguredSso) -> HTMLResponse:
    """Nobody is logged in any more; where the session at the provider can be ended, too."""
    return _sign_on_page(request, provider_logout=await sso.provider_logout())


def _check_own_page(request: Request, sso: SingleSignOn) -> None:
    if not sso.is_own_page(request):
        raise ProblemError(403, "only a page of this server may ask for this")


def _redirect(place: str) -> Response:
    return Response(status_code=303, headers=_HEADERS | _NOT_STORED | {"Location": place})


def _sign_on_page(
    request: Request, error: SignOnError | None = None, provider_logout: str | None = None
) -> HTMLResponse:
    context = {"error": None if error is None else str(error), "provider_logout": provider_logout}
    status = 200 if error is None else error.status
    headers = _HEADERS | _NOT_STORED
    return _templates.TemplateResponse(request, "sign_on.html", context, status_code=status, headers=headers)
