"""The OpenAPI document: what FastAPI derives, with our errors and tokens in it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from service.api.errors import MEDIA_TYPE
from service.api.schemas import Problem

_BEARER = {"type": "http", "scheme": "bearer"}


def install(app: FastAPI, *, authenticates: bool) -> None:
    """Make `app.openapi()` say: errors are problems; which calls carry which token."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, authenticates)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, authenticates: bool) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas["Problem"] = Problem.model_json_schema()
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["securitySchemes"] = {"user": _BEARER, "attempt": _BEARER}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if path.startswith("/api/v1/attempts/"):
                operation["security"] = [{"attempt": []}]
            elif authenticates and path.startswith("/api/"):
                operation["security"] = [{"user": []}]
            for status, response in operation["responses"].items():
                if status.startswith(("4", "5")):
                    problem = {"schema": {"$ref": "#/components/schemas/Problem"}}
                    response["content"] = {MEDIA_TYPE: problem}
    return document
