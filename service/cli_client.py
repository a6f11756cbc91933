"""What the verbs share: the HTTP client, errors for people, output as JSON or for eyes."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

out = Console()
err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON")]
DEFAULT_URL = "http://127.0.0.1:8000"


class CliError(Exception):
    """Something that the user must hear; the command ends with exit code 1."""


class Client:
    """Calls of one command to the server at SLOTLINE_URL, with the token of SLOTLINE_API_TOKEN."""

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        self.url = os.environ.get("SLOTLINE_URL", DEFAULT_URL).rstrip("/")
        token = os.environ.get("SLOTLINE_API_TOKEN")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout_s)

    def get(self, path: str, **params: Any) -> Any:
        given = {name: value for name, value in params.items() if value is not None}
        return self.call("GET", path, params=given).json()

    def post(self, path: str, **kwargs: Any) -> Any:
        return self.call("POST", path, **kwargs).json()

    def call(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """The response of a success; CliError with the problem's detail otherwise."""
        try:
            response = self._http.request(method, path, **kwargs)
        except httpx.HTTPError as error:
            raise self.unreachable(error) from None
        if response.is_error:
            raise CliError(problem_text(response))
        return response

    def stream(self, path: str, headers: dict[str, str]) -> Any:
        """A context that yields a streamed response."""
        return self._http.stream("GET", path, headers=headers, timeout=httpx.Timeout(30.0, read=None))

    def unreachable(self, error: Exception) -> CliError:
        return CliError(
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
