"""Who may call: users with an API token (when one is asked for), drivers with their attempt's token.

A token comes as `Authorization: Bearer`, or as the password of HTTP Basic, which browsers ask for;
Basic may change nothing unless the page that asks is our own (browsers send it with any request).
"""

from __future__ import annotations

import base64
import binascii
import hmac
from typing import Annotated

from fastapi import Depends, Request

from service.api.context import Current, Service
from service.api.errors import ProblemError
from service.store.attempts import find_attempt
from service.store.database import utc_now
from service.store.tables import Attempt
from service.store.tokens import find_token, token_digest

_ADMITTED = "slotline.admitted"
"""In the scope of a request that was let through: its route asks before the body is read, its dependencies again."""
_METRICS_PATH = "/api/v1/prometheus/targets"
"""All that the metrics' token opens; /metrics itself is open to everybody."""
_CHALLENGE = {"WWW-Authenticate": 'Basic realm="slotline", charset="UTF-8"'}


async def user(request: Request, service: Current) -> None:
    """Let the call through, or answer 401."""
    settings = service.settings
    if not settings.authenticates or request.scope.get(_ADMITTED):
        return
    token = _bearer(request) or _basic(request)
    if token is None:
        raise ProblemError(401, "a token is needed: send Authorization: Bearer <token>", headers=_CHALLENGE)
    is_ours = settings.api_token is not None and _same(token, settings.api_token.get_secret_value())
    if not is_ours and not _reads_targets(request, service, token) and not await _is_known(service, token):
        raise ProblemError(
            401, "the token is not valid: ask for one made by `slotline token`", headers=_CHALLENGE
        )
    request.scope[_ADMITTED] = True


async def driver(attempt_id: str, request: Request, service: Current) -> Attempt:
    """The attempt whose token the call carries; 401 for any other token, also of an unknown attempt."""
    if (admitted := request.scope.get(_ADMITTED)) is not None:
        return admitted
    async with service.database.read() as session:
        attempt = await find_attempt(session, attempt_id) if attempt_id.isprintable() else None
    token = _bearer(request)
    if token is None or attempt is None or not _same(token, attempt.token):
        raise ProblemError(
            401, "the attempt's token is needed: send the SLOTLINE_ATTEMPT_TOKEN that the driver was given"
        )
    request.scope[_ADMITTED] = attempt
    return attempt


DriverAttempt = Annotated[Attempt, Depends(driver)]


def _reads_targets(request: Request, service: Service, token: str) -> bool:
    wanted = service.settings.metrics_token
    return (
        wanted is not None
        and request.method == "GET"
        and request.scope["path"] == _METRICS_PATH
        and _same(token, wanted.get_secret_value())
    )


async def _is_known(service: Service, token: str) -> bool:
    async with service.database.read() as session:
        return await find_token(session, token_digest(token), at=utc_now())


def _bearer(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def _basic(request: Request) -> str | None:
    scheme, _, encoded = request.headers.get("authorization", "").partition(" ")
    own_page = request.headers.get("sec-fetch-site") == "same-origin"
    if scheme.lower() != "basic" or not (request.method in ("GET", "HEAD") or own_page):
        return None
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2].strip() or None
    except (binascii.Error, UnicodeDecodeError):
        return None


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
