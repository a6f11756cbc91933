"""What the verbs share: the HTTP client, errors for people, output as JSON or for eyes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from service.settings import is_loopback

out = Console()
err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON")]
_NOT_NOW = (502, 503, 504)
DEFAULT_URL = "http://127.0.0.1:8000"


class CliError(Exception):
    """Something that the user must hear; the command ends with exit code 1."""


class UnreachableError(CliError):
    """No server answers, perhaps only now."""


def checked(pattern: str, what: str) -> Callable[[str | None], str | None]:
    """A typer callback that lets through what the server would: text of `pattern`, or nothing."""

    def check(value: str | None) -> str | None:
        if value is not None and not re.fullmatch(pattern.removeprefix("^").removesuffix("$"), value):
            raise typer.BadParameter(f"{value!r} is not {what}: it looks like {pattern}")
        return value

    return check


class Client:
    """Calls of one command to the server at SLOTLINE_URL, with the token of SLOTLINE_API_TOKEN."""

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        self.url = (os.environ.get("SLOTLINE_URL") or DEFAULT_URL).rstrip("/")
        token = os.environ.get("SLOTLINE_API_TOKEN", "").strip()
        if not re.fullmatch(r"[\x21-\x7e]*", token):
            raise CliError("SLOTLINE_API_TOKEN holds characters that no token has: copy it again")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            through_proxies = not is_loopback(httpx.URL(self.url).host)  # a proxy's localhost is not ours
            self._http = httpx.Client(
                base_url=self.url, headers=headers, timeout=timeout_s, trust_env=through_proxies
            )
        except httpx.InvalidURL as error:
            raise CliError(
                f"SLOTLINE_URL {self.url!r} is no address ({error}): write http://host:port"
            ) from None

    def get(self, path: str, **params: Any) -> Any:
        given = {name: value for name, value in params.items() if value is not None}
        return self.json("GET", path, params=given)

    def post(self, path: str, **kwargs: Any) -> Any:
        return self.json("POST", path, **kwargs)

    def json(self, method: str, path: str, **kwargs: Any) -> Any:
        """The JSON of a success; CliError otherwise."""
        response = self.call(method, path, **kwargs)
        try:
            return response.json()
        except ValueError:
            raise CliError(f"{self.url} answers, but it is no Slotline: check SLOTLINE_URL") from None

    def call(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """The response of a success; CliError with the problem's detail otherwise."""
        try:
            response = self._http.request(method, path, **kwargs)
        except httpx.HTTPError as error:
            raise self.unreachable(error) from None
        if not response.is_success:
            kind = UnreachableError if response.status_code in _NOT_NOW else CliError
            raise kind(problem_text(response))
        return response

    def stream(self, path: str, headers: dict[str, str]) -> Any:
        """A context that yields a streamed response; the server sends a sign of life every 15 seconds."""
        return self._http.stream("GET", path, headers=headers, timeout=httpx.Timeout(30.0, read=60.0))

    def unreachable(self, error: Exception) -> UnreachableError:
        return UnreachableError(
            f"no Slotline answers at {self.url} ({error or type(error).__name__}): "
            "start one with `slotline serve`, or set SLOTLINE_URL to the one that runs"
        )


def problem_text(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}: {response.text[:500]}"


def print_json(value: Any) -> None:
    """One JSON document on standard output, never wrapped or coloured."""
    print(json.dumps(value, indent=2))
