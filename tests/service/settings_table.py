"""Writes what is made of the fields of `Settings`: a table (service/settings/README.md), and the names that the chart takes.

Run as `python -m tests.service.settings_table`; tests/service/test_readme.py and tests/deploy/test_chart.py compare.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

from pydantic import AliasChoices, SecretStr
from pydantic.fields import FieldInfo

from service.settings.settings import Settings

ROOT = Path(__file__).parents[2]
CHART_SCHEMA = ROOT / "deploy" / "chart" / "values.schema.json"
BEGIN, END = "<!-- settings -->", "<!-- /settings -->"
_SET_BY_THE_CHART = {
    *("host", "port", "data_dir", "database_url", "public_url", "driver_url", "require_token", "open_access"),
    *("metrics_ports", "clusters"),
}
"""Settings that values of their own make in the chart."""


def table() -> str:
    """One row a setting, in the order of the fields."""
    rows = [_row(name, field) for name, field in Settings.model_fields.items()]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])


def with_table(text: str) -> str:
    """The README with the table between its markers renewed."""
    pattern = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(
            f"service/settings/README.md has no lines {BEGIN} and {END}: put them around its table"
        )
    return pattern.sub(lambda _: f"{BEGIN}\n{table()}\n{END}", text)


def chart_settings() -> list[str]:
    """Variables that the chart's `settings` may hold: no secrets, as a ConfigMap shows them, none that it sets."""
    return [
        _variable(name, field)
        for name, field in Settings.model_fields.items()
        if name not in _SET_BY_THE_CHART
        and SecretStr not in (field.annotation, *get_args(field.annotation))
        and _variable(name, field).startswith("SLOTLINE_")
    ]


def with_chart_settings(text: str) -> str:
    """values.schema.json with the settings renewed."""
    schema = json.loads(text)
    value = {"type": ["string", "number", "boolean"]}
    schema["properties"]["settings"] = {
        "type": "object",
        "description": "SLOTLINE_* settings by name; secrets belong into secrets, which envFrom names",
        "properties": dict.fromkeys(chart_settings(), value),
        "additionalProperties": False,
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _row(name: str, field: FieldInfo) -> str:
    if not field.description:
        raise ValueError(f"setting {name} has no description: give its field one")
    default = _default(name, field.get_default(call_default_factory=True))
    return f"| `{_variable(name, field)}` | {default} | {field.description} |"


def _variable(name: str, field: FieldInfo) -> str:
    alias = field.validation_alias
    return str(alias.choices[-1]) if isinstance(alias, AliasChoices) else f"SLOTLINE_{name.upper()}"


def _default(name: str, value: Any) -> str:
    if value is None or value == "" or isinstance(value, SecretStr):
        return ""
    if name.endswith("_bytes"):
        return f"{value} ({_size(value)})"
    if name == "queues":
        return '`{"default": null}`'
    if isinstance(value, bool | list | dict):
        return f"`{json.dumps(value)}`"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, int) else f"`{value}`"


def _size(value: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value % unit == 0:
            return f"{value // unit} {name}"
    return f"{value} B"


def main() -> None:
    readme = ROOT / "service" / "settings" / "README.md"
    readme.write_text(with_table(readme.read_text()))
    CHART_SCHEMA.write_text(with_chart_settings(CHART_SCHEMA.read_text()))


if __name__ == "__main__":
    main()
