"""Route `/docs`: the OpenAPI document as a plain page, without scripts, that loads nothing from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

router = APIRouter(include_in_schema=False)
_DOCS_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{font-size:14px}summary{cursor:pointer;padding:.3rem 0}details>div{margin:0 0 1rem 1.5rem}"
    "td{padding:.1rem 1rem .1rem 0;vertical-align:top}.method{display:inline-block;width:4rem;font-weight:600}"
)
_CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


@router.get("/docs", response_class=HTMLResponse)
async def docs(request: Request) -> HTMLResponse:
    """Calls with their parameters and answers."""
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
    routes = "".join(f"<h2>{escape(tag)}</h2>{''.join(routes_html)}" for tag, routes_html in tagged.items())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}: the API</title>'
        f"<style>{_DOCS_STYLE}</style><h1>{title}</h1><p>{escape(document['info'].get('summary', ''))}. "
        f'The same for programs: <a href="/openapi.json">openapi.json</a>.</p>'
        f"{routes}<h2>values</h2>{schemas}</html>"
    )


def _route_html(path: str, method: str, operation: dict[str, Any]) -> str:
    text = escape(operation.get("description") or operation.get("summary") or "")
    parameters = [
        (
            parameter["name"],
            f"{parameter['in']}, {_type_html(parameter.get('schema', {}))}",
            parameter.get("description", ""),
        )
        for parameter in operation.get("parameters", [])
    ]
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        parameters.append(("body", f"{escape(media)}, {_type_html(content.get('schema', {}))}", ""))
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
        for name, kind, what in [*parameters, *answers]
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
    """The type of a value in a few words; a link where it has a name."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rsplit("/", 1)[-1])
        return f'<a href="#{name}">{name}</a>'
    for combination in ("anyOf", "oneOf", "allOf"):
        if combination in schema:
            return " or ".join(_type_html(option) for option in schema[combination])
    if "enum" in schema:
        return escape(" | ".join(map(str, schema["enum"])))
    if schema.get("type") == "array":
        return f"list of {_type_html(schema.get('items', {}))}"
    return escape(str(schema.get("type", "anything")))
