"""The answer while something is being made: 202, and when to send the same again."""

from __future__ import annotations

from fastapi import Response
from pydantic import BaseModel

_AGAIN_S = "1"


def ask_again(waiting: BaseModel) -> Response:
    """Says what is under way, and asks for the same request a second later."""
    return Response(
        waiting.model_dump_json(),
        status_code=202,
        media_type="application/json",
        headers={"Retry-After": _AGAIN_S},
    )
