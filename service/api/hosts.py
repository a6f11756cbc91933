"""Keeps foreign web pages away from a server without tokens, which trusts whoever is on this machine.

A page that somebody here visits can call 127.0.0.1 as well, with a name of its own that resolves to
it (DNS rebinding) even as if it were ours; and a job may run any code. So the name in the address must
be this machine's, and a change must not come from another site.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.errors import problem_response
from service.settings import Settings, is_loopback

_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[^\[\]:]*))(?::\d*)?")


class OwnPagesOnly:
    """ASGI middleware: 403 unless the Host header names this machine or is one of `names`."""

    def __init__(self, app: ASGIApp, *, names: Collection[str]) -> None:
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := self._problem(scope)):
            await problem_response(403, problem)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> str | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        name = _name(headers.get(b"host", "localhost"))
        if not (is_loopback(name) or name.endswith(".localhost") or name in self._names):
            return (
                f"this server without tokens answers to names of this machine, not to {name!r}: call it by "
                "127.0.0.1, set SLOTLINE_PUBLIC_URL to the address that is used, or SLOTLINE_REQUIRE_TOKEN=true"
            )
        if scope["method"] not in ("GET", "HEAD") and not _is_own_page(headers):
            return "a page of another origin may change nothing here: set SLOTLINE_REQUIRE_TOKEN=true and send a token"
        return None


def own_names(settings: Settings) -> set[str] | None:
    """Names besides those of this machine; None where everybody may call: with a token, or by a setting."""
    if settings.authenticates or settings.open_access:
        return None
    return {httpx.URL(settings.url).host, httpx.URL(settings.control_url).host, settings.host}


def _is_own_page(headers: Mapping[bytes, str]) -> bool:
    """Whether no other origin's page asks; another port of this machine is another origin, though the same site."""
    if (site := headers.get(b"sec-fetch-site")) is not None:
        return site in ("none", "same-origin")
    origin = headers.get(b"origin")  # of browsers that do not send the other, and of no program
    return origin is None or origin.partition("://")[2].lower() == headers.get(b"host", "").lower()


def _name(host: str) -> str:
    """The name in a Host header: without port, and without the brackets of IPv6; as it is where it is neither."""
    found = _HOST.fullmatch(host)
    return (found["v6"] or found["name"]).lower() if found else host
