"""Who may call: users with an API token (when one is asked for), drivers with their attempt's token.

A token comes as `Authorization: Bearer`, or as the password of HTTP Basic, which browsers ask for;
Basic may change nothing unless the page that asks is our own (browsers send it with any request).
What a user may call is said by roles.py; what is whose, by the routes themselves.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from typing import Annotated

from fastapi import Depends, Request

from service.api.context import Current, Service
from service.api.errors import ProblemError
from service.api.oidc import IdentityProvider, InvalidTokenError, KeysUnavailableError, NoRoleError
from service.api.roles import least_role
from service.principals import EVERYBODY, ROOT, SCRAPER, Principal, Role
from service.store.attempts import find_attempt
from service.store.database import utc_now
from service.store.tables import Attempt
from service.store.tokens import find_token, token_digest

_ADMITTED = "slotline.admitted"
"""In the scope of a request that was let through: its route asks before the body is read, its dependencies again."""
_CHALLENGE = {"WWW-Authenticate": 'Basic realm="slotline", charset="UTF-8"'}


async def user(request: Request, service: Current) -> Principal:
    """Who calls; 401 for nobody that is known, 403 for somebody who may not call this route."""
    if not service.settings.authenticates:
        return EVERYBODY
    if (admitted := request.scope.get(_ADMITTED)) is not None:
        return admitted
    token = _bearer(request) or _basic(request)
    if token is None:
        raise ProblemError(401, "a token is needed: send Authorization: Bearer <token>", headers=_CHALLENGE)
    caller = await _principal(service, token)
    if caller is None:
        raise ProblemError(
            401, "the token is not valid: ask for one made by `slotline token`", headers=_CHALLENGE
        )
    path = getattr(request.scope.get("route"), "path", "")
    least = least_role(request.method, path)
    if not caller.role.includes(least):
        raise ProblemError(
            403,
            f"{caller.name} is {caller.role}, and {request.method} {path} takes {least}: "
            "ask an admin for a token with that role",
        )
    request.scope[_ADMITTED] = caller
    return caller


Caller = Annotated[Principal, Depends(user)]


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


async def _principal(service: Service, token: str) -> Principal | None:
    """Whose token it is: a setting's, else one of the store."""
    settings = service.settings
    for secret, owner in (
        (settings.api_token, Principal(ROOT, Role.ADMIN)),
        (settings.metrics_token, Principal(SCRAPER, Role.METRICS)),
    ):
        if secret is not None and _same(token, secret.get_secret_value()):
            return owner
    if service.identity is not None and token.count(".") == 2:  # a JWT: no token of ours has a dot
        return await _said_by(service.identity, token)
    async with service.database.read() as session:
        return await find_token(session, token_digest(token), at=utc_now())


async def _said_by(identity: IdentityProvider, token: str) -> Principal:
    try:
        return await identity.principal(token)
    except InvalidTokenError as error:
        raise ProblemError(
            401, f"the token of the identity provider is not valid: {error}", headers=_CHALLENGE
        ) from None
    except NoRoleError as error:
        raise ProblemError(403, f"{error}: ask an admin") from None
    except KeysUnavailableError:
        raise ProblemError(
            503, "the identity provider's keys cannot be read: try again", headers={"Retry-After": "30"}
        ) from None


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
