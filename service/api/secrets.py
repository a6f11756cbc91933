"""A caller's secrets: written and named here, and read by the drivers of the caller's jobs only."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Response

from service.api.auth import Caller
from service.api.context import Current
from service.api.errors import ProblemError, responses
from service.api.guarded import UserRoute
from service.api.people_schemas import SecretList, SecretView
from service.job_environment import LONGEST_SECRET, SHORTEST_SECRET, VARIABLE_PATTERN, checked_name
from service.sealing import NoKeyError, SecretBox
from service.store.database import utc_now
from service.store.secrets import delete_secret, list_secrets, store_secret

router = APIRouter(prefix="/api/v1/secrets", tags=["people"], route_class=UserRoute)

SecretName = Annotated[
    str, Path(pattern=VARIABLE_PATTERN, description="The variable that jobs will find it in")
]


@router.get("")
async def list_own(caller: Caller, service: Current) -> SecretList:
    """The names of the caller's secrets, and when each was set."""
    async with service.database.read() as session:
        found = await list_secrets(session, caller.name)
    return SecretList(items=[SecretView.model_validate(one, from_attributes=True) for one in found])


@router.put("/{name}", status_code=204, responses=responses(409, 413, 422))
async def write(
    name: SecretName,
    value: Annotated[bytes, Body(media_type="text/plain")],
    caller: Caller,
    service: Current,
) -> Response:
    """Keep a secret, encrypted, under its name; no answer ever holds it. The body is the value as it is, in UTF-8."""
    try:
        checked_name(name)
    except ValueError as error:
        raise ProblemError(422, str(error)) from None
    if len(value) > LONGEST_SECRET:
        raise ProblemError(413, f"the secret is longer than {LONGEST_SECRET} bytes: put it into a file")
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise ProblemError(422, "the secret is not text in UTF-8: encode it, e.g. in base64") from None
    if len(text.strip()) < SHORTEST_SECRET or "\0" in text:
        raise ProblemError(
            422,
            f"a secret has at least {SHORTEST_SECRET} characters, none of them NUL, so that it can be kept out of "
            "logs: what is no secret belongs into the job's env",
        )
    try:
        sealed = SecretBox.of(service.settings).seal(caller.name, name, text)
    except NoKeyError as error:
        raise ProblemError(409, str(error)) from None
    async with service.database.write() as session:
        await store_secret(session, caller.name, name, sealed, at=utc_now())
    return Response(status_code=204)


@router.delete("/{name}", status_code=204, responses=responses(404, 422))
async def remove(name: SecretName, caller: Caller, service: Current) -> Response:
    """Forget a secret: jobs that name it end with a reason at their next attempt."""
    async with service.database.write() as session:
        known = await delete_secret(session, caller.name, name, at=utc_now())
    if not known:
        raise ProblemError(404, f"you have no secret {name}: GET /api/v1/secrets lists them")
    return Response(status_code=204)
