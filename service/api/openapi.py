"""Builds the OpenAPI document, with our errors and tokens, and serves it as the plain page /docs.

The page has no script, and loads nothing from elsewhere.
"""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse

from service.api.errors import PROBLEM_MEDIA_TYPE
from service.schemas.jobs import Problem

docs_router = APIRouter(include_in_schema=False)
_DOCS_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{font-size:14px}summary{cursor:pointer;padding:.3rem 0}details>div{margin:0 0 1rem 1.5rem}"
    "td{padding:.1rem 1rem .1rem 0;vertical-align:top}.method{display:inline-block;width:4rem;font-weight:600}"
)
_CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


@docs_router.get("/docs", response_class=HTMLResponse)
async def docs(request: Request) -> HTMLResponse:
    """What can be called, with which values, and what it answers."""
    document = request.app.openapi()
    return HTMLResponse(_docs_page(document), headers={"Content-Security-Policy": _CONTENT_SECURITY_POLICY})


def _docs_page(document: dict[str, Any]) -> str:
    tagged: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = (operation.get("tags") or ["other"])[0]
            tagged.setdefault(tag, []).append(_route_html(path, method, operation))
    title = escape(document["info"]["title"])
    schemas = "".join(
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_fields_html(schema)}</details>'
        for name, schema in document["components"]["schemas"].items()
    )
    routes = "".join(f"<h2>{escape(tag)}</h2>{''.join(found)}" for tag, found in tagged.items())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}: the API</title>'
        f"<style>{_DOCS_STYLE}</style><h1>{title}</h1><p>{escape(document['info'].get('summary', ''))}. "
        f'The same for programs: <a href="/openapi.json">openapi.json</a>.</p>'
        f"{routes}<h2>values</h2>{schemas}</html>"
    )


def _route_html(path: str, method: str, operation: dict[str, Any]) -> str:
    text = escape(operation.get("description") or operation.get("summary") or "")
    given = [
        (one["name"], f"{one['in']}, {_type_html(one.get('schema', {}))}", one.get("description", ""))
        for one in operation.get("parameters", [])
    ]
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        given.append(("body", f"{escape(media)}, {_type_html(content.get('schema', {}))}", ""))
    answers = [
        (
            status,
            ", ".join(_type_html(c.get("schema", {})) for c in answer.get("content", {}).values()),
            answer.get("description", ""),
        )
        for status, answer in operation["responses"].items()
    ]
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{kind}<td>{escape(what)}"
        for name, kind, what in [*given, *answers]
    )
    return (
        f'<details><summary><span class="method">{method.upper()}</span> <code>{escape(path)}</code></summary>'
        f"<div><p>{text}</p><table>{rows}</table></div></details>"
    )


def _fields_html(schema: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{_type_html(field)}<td>{escape(field.get('description', ''))}"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<div><p>{escape(schema.get('description', ''))}</p><table>{rows}</table></div>"


def _type_html(schema: dict[str, Any]) -> str:
    """What a value is, in a few words; a link where it has a name."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        return f'<a href="#{name}">{name}</a>'
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(_type_html(one) for one in schema[several])
    if "enum" in schema:
        return escape(" | ".join(map(str, schema["enum"])))
    if schema.get("type") == "array":
        return f"list of {_type_html(schema.get('items', {}))}"
    return escape(str(schema.get("type", "anything")))


_BEARER_SCHEME = {"type": "http", "scheme": "bearer"}


def install_openapi(app: FastAPI, *, authenticates: bool) -> None:
    """Make `app.openapi()` say: errors are problems; which calls carry which token."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _openapi_document(app, authenticates)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _openapi_document(app: FastAPI, authenticates: bool) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas["Problem"] = Problem.model_json_schema()
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    components["securitySchemes"] = {"user": _BEARER_SCHEME, "attempt": _BEARER_SCHEME}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if path.startswith("/api/v1/attempts/"):
                operation["security"] = [{"attempt": []}]
            elif authenticates and path.startswith("/api/"):
                operation["security"] = [{"user": []}]
            for status, response in operation["responses"].items():
                if status.startswith(("4", "5")):
                    problem = {"schema": {"$ref": "#/components/schemas/Problem"}}
                    response["content"] = {PROBLEM_MEDIA_TYPE: problem}
    return document
