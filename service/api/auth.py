"""Authentication of users and drivers by token, and the table of the least role that each route requires.

Users send an API token, a JWT of the identity provider (oidc.py), or the token of a setting; drivers send the token
of their attempt. A token comes as `Authorization: Bearer`, or as the password of HTTP Basic, which browsers ask for.
Where pages log in at the identity provider, browsers have a session (sso.py). They send it, and Basic, with any
request, so neither may change anything unless the page that asks is our own.

A route that LEAST_ROLE does not list is for admins; a test finds it. A route with a job's id answers 404 where the
caller is not in the job's project, before it begins. Ownership of single jobs, plans and secrets is checked by the
routes themselves, which find the caller's projects in the Principal.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from dataclasses import replace
from typing import Annotated

from fastapi import Depends, Request

from service.api.dependencies import CurrentService
from service.api.oidc import IdentityProvider, InvalidTokenError, IssuerUnavailableError, NoRoleError
from service.api.sso import SIGNED_ON, sso_of
from service.jobs.lifecycle import visible_scope
from service.jobs.problems import ProblemError
from service.jobs.service import Service
from service.spec.names import JOB_ID_PATTERN
from service.spec.principals import (
    API_TOKEN_PRINCIPAL,
    METRICS_TOKEN_PRINCIPAL,
    OPEN_ACCESS_PRINCIPAL,
    Principal,
    Role,
)
from service.store.attempts import find_attempt
from service.store.database import utc_now
from service.store.queues import project_roles_of
from service.store.secrets import find_token, token_digest
from service.store.tables import AttemptRow

_VIEWER_ROUTES = (
    ("GET", "/"),
    ("GET", "/cluster"),
    ("GET", "/compare"),
    ("GET", "/docs"),
    ("GET", "/jobs/{job_id}"),
    ("GET", "/jobs/{job_id}/choice"),
    ("GET", "/jobs/{job_id}/gaps"),
    ("GET", "/jobs/{job_id}/memory"),
    ("GET", "/jobs/{job_id}/profiled-steps"),
    ("GET", "/api/v1/cluster"),
    ("GET", "/api/v1/jobs"),
    ("GET", "/api/v1/jobs/{job_id}"),
    ("GET", "/api/v1/jobs/{job_id}/artifacts"),
    ("GET", "/api/v1/jobs/{job_id}/checkpoints"),
    ("GET", "/api/v1/jobs/{job_id}/evaluations"),
    ("GET", "/api/v1/jobs/{job_id}/events"),
    ("GET", "/api/v1/jobs/{job_id}/logs"),
    ("GET", "/api/v1/jobs/{job_id}/notifications"),
    ("GET", "/api/v1/jobs/{job_id}/plan"),
    ("GET", "/api/v1/jobs/{job_id}/postmortem"),
    ("GET", "/api/v1/jobs/{job_id}/steps"),
    ("GET", "/api/v1/jobs/{job_id}/timeline"),
    ("GET", "/api/v1/jobs/{job_id}/why"),
    ("GET", "/api/v1/nodes"),
    ("GET", "/api/v1/plans/named"),
    ("GET", "/api/v1/plans/named/{name}"),
    ("GET", "/api/v1/projects"),
    ("GET", "/api/v1/projects/{name}"),
    ("GET", "/api/v1/queues"),
    ("GET", "/api/v1/usage"),
    ("GET", "/api/v1/whoami"),
)
_SUBMITTER_ROUTES = (
    ("POST", "/api/v1/jobs"),
    ("PATCH", "/api/v1/jobs/{job_id}"),  # their own, as the next ones
    ("POST", "/api/v1/jobs/{job_id}/cancel"),  # their own; operators all
    ("POST", "/api/v1/jobs/{job_id}/export"),  # it runs on the cluster
    ("POST", "/api/v1/jobs/{job_id}/retry"),
    ("DELETE", "/api/v1/jobs/{job_id}/checkpoints/{step}"),
    ("DELETE", "/api/v1/jobs/{job_id}/exports/{name}"),
    ("POST", "/api/v1/packages"),
    ("POST", "/api/v1/plans"),  # it computes
    ("POST", "/api/v1/plans/job"),  # it runs the job's code
    ("DELETE", "/api/v1/plans/named/{name}"),  # their own; operators all
    ("GET", "/api/v1/secrets"),  # their own, as all of these
    ("PUT", "/api/v1/secrets/{name}"),
    ("DELETE", "/api/v1/secrets/{name}"),
)
_OPERATOR_ROUTES = (
    ("PUT", "/api/v1/nodes/{name}"),
    ("PUT", "/api/v1/queues/{name}/quota"),
    ("DELETE", "/api/v1/queues/{name}/quota"),
    ("PUT", "/api/v1/projects/{name}/quotas/{queue}"),
)
_ADMIN_ROUTES = (
    ("GET", "/api/v1/audit"),
    ("PUT", "/api/v1/projects/{name}/members"),
    ("DELETE", "/api/v1/projects/{name}/members"),
    ("GET", "/api/v1/tokens"),
    ("POST", "/api/v1/tokens"),
    ("DELETE", "/api/v1/tokens/{name}"),
)
LEAST_ROLE: dict[tuple[str, str], Role] = {
    ("GET", "/api/v1/prometheus/targets"): Role.METRICS,
    **dict.fromkeys(_VIEWER_ROUTES, Role.VIEWER),
    **dict.fromkeys(_SUBMITTER_ROUTES, Role.SUBMITTER),
    **dict.fromkeys(_OPERATOR_ROUTES, Role.OPERATOR),
    **dict.fromkeys(_ADMIN_ROUTES, Role.ADMIN),
}


def least_role(method: str, path: str) -> Role:
    """The least role of a caller of the route with this template of a path."""
    return LEAST_ROLE.get(("GET" if method == "HEAD" else method, path), Role.ADMIN)


_ADMITTED = "slotline.admitted"
"""In the scope of a request that was let through: its route asks before the body is read, its dependencies again."""


async def require_user(request: Request, service: CurrentService) -> Principal:
    """The caller with its projects; 401 without a valid token, 403 where its role may not call this route, 404 for a job
    of a project that it is not in."""
    if not service.settings.authenticates:
        return OPEN_ACCESS_PRINCIPAL
    if (admitted := request.scope.get(_ADMITTED)) is not None:
        return admitted
    token = _bearer_token(request) or _basic_token(request)
    if token is None:
        caller = _session_principal(request)
    else:
        caller = await _find_principal(service, token, request)
    if caller is None:
        detail = (
            "a token is needed: send Authorization: Bearer <token>"
            if token is None
            else "the token is not valid: ask for one made by `slotline token`"
        )
        raise ProblemError(401, detail, headers=_challenge(request))
    path = getattr(request.scope.get("route"), "path", "")
    least = least_role(request.method, path)
    if not caller.role.includes(least):
        raise ProblemError(
            403,
            f"{caller.name} is {caller.role}, and {request.method} {path} takes {least}: "
            "ask an admin for a token with that role",
        )
    caller = await _with_projects(service, caller, request.path_params.get("job_id", ""))
    request.scope[_ADMITTED] = caller
    return caller


async def _with_projects(service: Service, caller: Principal, job_id: str) -> Principal:
    """The caller with its roles in projects; 404 for the id of a job that it does not see, as for one that nothing has."""
    if caller.visible_projects is None:
        return caller
    async with service.database.read() as session:
        caller = replace(caller, projects=await project_roles_of(session, caller.name))
        if re.fullmatch(JOB_ID_PATTERN, job_id):
            await visible_scope(session, caller, job_id)
    return caller


async def is_scraper(request: Request, service: Service) -> bool:
    """True for a caller who may know of all jobs: with the metrics token or an operator's, and where none is asked for."""
    if not service.settings.authenticates:
        return True
    token = _bearer_token(request) or _basic_token(request)
    try:
        caller = None if token is None else await _find_principal(service, token, request)
    except ProblemError:
        return False
    return caller is not None and (caller.role is Role.METRICS or caller.visible_projects is None)


Caller = Annotated[Principal, Depends(require_user)]


async def require_driver(attempt_id: str, request: Request, service: CurrentService) -> AttemptRow:
    """The attempt whose token the call carries; 401 for any other token, also of an unknown attempt."""
    if (admitted := request.scope.get(_ADMITTED)) is not None:
        return admitted
    async with service.database.read() as session:
        attempt = await find_attempt(session, attempt_id) if attempt_id.isprintable() else None
    token = _bearer_token(request)
    if token is None or attempt is None or not _same_secret(token, attempt.token):
        raise ProblemError(
            401,
            "the attempt's token is needed: SLOTLINE_ATTEMPT_TOKEN, and once it is exchanged the one that the driver made; "
            "where a driver is refused at its first call, somebody else made the exchange: retry the job",
        )
    request.scope[_ADMITTED] = attempt
    return attempt


DriverAttempt = Annotated[AttemptRow, Depends(require_driver)]


def _challenge(request: Request) -> dict[str, str]:
    """The scheme that a refusal asks for: browsers ask their users for Basic; not where these log in at the provider,
    unless they want to use a token (`/?token`)."""
    by_token = sso_of(request.app) is None or "token" in request.query_params
    return {
        "WWW-Authenticate": 'Basic realm="slotline", charset="UTF-8"'
        if by_token
        else 'Bearer realm="slotline"'
    }


def _session_principal(request: Request) -> Principal | None:
    """The user of the pages' session; None without one. 403 for a change that another page sends with it."""
    sso = sso_of(request.app)
    session = None if sso is None else sso.session(request)
    if sso is None or session is None:
        return None
    if request.method not in ("GET", "HEAD") and not sso.is_own_page(request):
        raise ProblemError(
            403, "only a page of this server may change something with the browser's login: send a token"
        )
    request.scope[SIGNED_ON] = session.name
    return session.principal


async def _find_principal(service: Service, token: str, request: Request) -> Principal | None:
    """The owner of a token of the settings, of the identity provider, or of the store; None for an unknown one."""
    settings = service.settings
    for secret, owner in (
        (settings.api_token, Principal(API_TOKEN_PRINCIPAL, Role.ADMIN)),
        (settings.metrics_token, Principal(METRICS_TOKEN_PRINCIPAL, Role.METRICS)),
    ):
        if secret is not None and _same_secret(token, secret.get_secret_value()):
            return owner
    if service.identity is not None and token.count(".") == 2:  # a JWT: no token of ours has a dot
        return await _oidc_principal(service.identity, token, request)
    async with service.database.read() as session:
        return await find_token(session, token_digest(token), at=utc_now())


async def _oidc_principal(identity: IdentityProvider, token: str, request: Request) -> Principal:
    try:
        return await identity.principal(token)
    except InvalidTokenError as error:
        raise ProblemError(
            401, f"the token of the identity provider is not valid: {error}", headers=_challenge(request)
        ) from None
    except NoRoleError as error:
        raise ProblemError(403, f"{error}: ask an admin") from None
    except IssuerUnavailableError:
        raise ProblemError(
            503, "the identity provider's keys cannot be read: try again", headers={"Retry-After": "30"}
        ) from None


def _bearer_token(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def _basic_token(request: Request) -> str | None:
    scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
    own_page = request.headers.get("sec-fetch-site") == "same-origin"
    if scheme.lower() != "basic" or not (request.method in ("GET", "HEAD") or own_page):
        return None
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2].strip() or None
    except (binascii.Error, UnicodeDecodeError):
        return None


def _same_secret(token: str, other: str) -> bool:
    return hmac.compare_digest(token.encode(), other.encode())
