"""The dashboard of stored steps: any profiled step of any job, from PostgreSQL's tables.

Reads `jobs`, `steps`, `timelines`, `slots` and plans as the role of reader.sql; knows no metrics.
"""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, dashboard, table, trend
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.runtime import UnknownDataquery
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from panels import TAGS, sisters, slot_timeline

_KIND = "grafana-postgresql-datasource"
_SOURCE = common_models.DataSourceRef(type_val=_KIND, uid="${database}")
_JOB = "${job:sqlstring}"
_STEP = f"job_id = {_JOB} AND step = $step"
_MESHES = "mesh IN (${mesh:sqlstring})"
# The axis has a millisecond for each microsecond of the step, so its ends are the window's in microseconds.
_WINDOW = "1e6 * end_s >= ${__from} AND 1e6 * start_s <= ${__to}"
_IN_ORDER = "substring(mesh from '[0-9]+')::bigint NULLS FIRST, mesh"

_TIMELINE = f"""
WITH profiled AS (SELECT attempt FROM timelines WHERE {_STEP}),
whole AS (SELECT min(start_s) AS first_s FROM slots WHERE {_STEP}),
rows AS (
  SELECT mesh, lane, 'run' AS kind, action, microbatch, stage, start_s - first_s AS start_s, end_s - first_s AS end_s
  FROM slots, whole WHERE {_STEP} AND {_MESHES}
  UNION ALL
  SELECT p.mesh, p.lane, 'plan', p.action, p.microbatch, p.stage, p.start_s, p.end_s
  FROM plans JOIN profiled USING (attempt),
       jsonb_to_recordset(body::jsonb -> 'plan' -> 'slots') AS p(
         mesh text, lane text, action text, microbatch int, stage text, start_s float8, end_s float8)
  WHERE job_id = {_JOB} AND p.{_MESHES}
)
SELECT mesh || ' ' || lane || ' ' || kind AS row,
       to_timestamp(1000 * start_s) AS start,
       to_timestamp(1000 * end_s) AS end,
       action || coalesce(microbatch::text, '') || ' ' || coalesce(stage, '') AS "Value"
FROM rows
WHERE {_WINDOW}
ORDER BY {_IN_ORDER}, lane, kind, start_s
"""
# A microsecond of the step is a millisecond after 1970: to_timestamp takes seconds, so a second is a thousand.
_CURVES = f"""
SELECT step, loss, step_s, makespan_s, bubble_ratio, grad_norm, learning_rate FROM steps WHERE job_id = {_JOB} ORDER BY step
"""
_NUMBERS = f"""
SELECT step, attempt, loss, step_s, makespan_s, bubble_ratio, exposed_transfer_s, overlap_ratio, grad_norm, learning_rate
FROM steps WHERE {_STEP}
"""
_COMPUTE = f"""
SELECT mesh, sum(end_s - start_s) AS seconds
FROM slots WHERE {_STEP} AND action IN ('F', 'B', 'I', 'W') GROUP BY mesh ORDER BY mesh
"""


def build() -> models.Dashboard:
    """One job's curves over steps, and the slots of the chosen step and meshes within the time range."""
    board = (
        dashboard.Dashboard("Slotline: stored steps")
        .uid("slotline-steps")
        .description("Any profiled step of any job, as the control plane stored it in PostgreSQL.")
        .tags(TAGS)
        .link(sisters())
        .time("1970-01-01T00:00:00.000Z", "1970-01-01T00:01:00.000Z")
        .timezone("utc")
        .with_variable(dashboard.DatasourceVariable("database").label("Database").type(_KIND))
        .with_variable(
            _variable(
                "job",
                "Job",
                "SELECT name || ' ' || id AS __text, id AS __value FROM jobs ORDER BY created_at DESC",
            )
        )
        .with_variable(
            _variable("step", "Step", f"SELECT step FROM timelines WHERE job_id = {_JOB} ORDER BY step DESC")
        )
        .with_variable(
            _variable(
                "mesh",
                "Meshes",
                f"SELECT mesh FROM (SELECT DISTINCT mesh FROM slots WHERE {_STEP}) AS known ORDER BY {_IN_ORDER}",
            )
            .multi(True)
            .include_all(True)
            .current(models.VariableOption(text="All", value="$__all", selected=True))
        )
    )
    panels = [
        _curve("Loss", "short", ["loss"], "Of each step, over its number."),
        _curve(
            "Step time and makespan", "s", ["step_s", "makespan_s"], "As measured, over the step's number."
        ),
        _curve(
            "Bubble",
            "percentunit",
            ["bubble_ratio"],
            "Share of the makespan in which meshes compute nothing.",
        ),
        _curve(
            "Gradient norm",
            "short",
            ["grad_norm"],
            "Of all gradients together, before clipping.",
            span=12,
        ),
        _curve(
            "Learning rate",
            "short",
            ["learning_rate"],
            "Of the first group of parameters.",
            span=12,
        ),
        table.Panel()
        .title("Step $step")
        .description("What was measured of the step.")
        .datasource(_SOURCE)
        .span(16)
        .height(4)
        .with_target(_Query(_NUMBERS)),
        bargauge.Panel()
        .title("Compute time of each mesh")
        .description("Sum over the slots of the step.")
        .datasource(_SOURCE)
        .unit("s")
        .min(0)
        .span(8)
        .height(4)
        .orientation(common_models.VizOrientation.HORIZONTAL)
        .reduce_options(common.ReduceDataOptions().values(True).calcs([]))
        .with_target(_Query(_COMPUTE)),
        slot_timeline("Slots of step $step", _SOURCE, []).with_target(_Query(_TIMELINE)),
    ]
    for panel in panels:
        board = board.with_panel(panel)
    return board.build()


def _variable(name: str, label: str, sql: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(_SOURCE)
        .query(sql)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    )


def _curve(title: str, unit: str, columns: list[str], about: str, *, span: int = 8) -> trend.Panel:
    """Columns over the step number."""
    keep = {"include": {"names": ["step", *columns]}}
    return (
        trend.Panel()
        .title(title)
        .description(about)
        .datasource(_SOURCE)
        .x_field("step")
        .unit(unit)
        .span(span)
        .height(8)
        .override_by_name("step", [models.DynamicConfigValue("unit", "none")])
        .legend(common.VizLegendOptions().show_legend(len(columns) > 1))
        .with_target(_Query(_CURVES))
        .with_transformation(models.DataTransformerConfig("filterFieldsByName", options=keep))
    )


class _Query(Builder[UnknownDataquery]):
    """A SQL query whose answer is a table (the SDK has no builder for PostgreSQL)."""

    def __init__(self, sql: str) -> None:
        self._sql = sql

    def build(self) -> UnknownDataquery:
        source: dict[str, Any] = {"type": _KIND, "uid": "${database}"}
        options = {"datasource": source, "format": "table", "rawQuery": True, "editorMode": "code"}
        return UnknownDataquery({**options, "rawSql": self._sql.strip(), "refId": "A"})
