"""Grafana dashboards as code: `python dashboards/build.py` writes their JSON beside this file.

It also copies them and rules.yml into the Helm chart, which can read no file outside its own folder.
This one reads Prometheus; steps.py reads PostgreSQL. They know the metrics' names (DESIGN section
11), the tables and Grafana; nothing of how anything is measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import steps
from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models
from panels import slot_timeline

HERE = Path(__file__).parent
CHART_FILES = HERE.parent / "deploy" / "chart" / "files"

_SOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_JOB = '{job="$job"}'

# A job's driver may linger beside that of its next attempt: only one endpoint's slots are drawn.
_ONE = f"and on (instance) topk(1, slotline_profiled_step{_JOB})"
_START = f"(slotline_slot_start_timestamp_seconds{_JOB} {_ONE})"
_DURATION = f"(slotline_slot_duration_seconds{_JOB} {_ONE})"
# A block ends a microsecond early: Unix times round to a quarter of one, and an end that rounds to
# after the next start would blank the next block.
_END = f"{_START} + clamp_min({_DURATION} - 1e-6, 5e-7)"
_LENGTH = f"(max({_START} + {_DURATION}) - min({_START}))"


def build() -> models.Dashboard:
    """The dashboard: the cluster's jobs, one job's curves, and its last profiled step."""
    board = (
        dashboard.Dashboard("Slotline")
        .uid("slotline")
        .description("Pipeline-parallel training: jobs, step times, and the slots of the last profiled step.")
        .tags(["slotline"])
        .refresh("10s")
        .time("now-15m", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("job")
            .label("Job")
            .datasource(_SOURCE)
            .query("label_values(slotline_step, job)")
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_DESC)
        )
    )
    for title, panels in (("Jobs", _jobs()), ("Job $job", _job()), ("Last profiled step of $job", _slots())):
        board = board.with_row(dashboard.Row(title))
        for panel in panels:
            board = board.with_panel(panel)
    return board.build()


def _jobs() -> list[Any]:
    return [
        _series("Jobs by state", "short", ("slotline_jobs", "{{state}}"), span=8, stacked=True).description(
            "Jobs in the control plane's store, by state."
        ),
        _series("Queue depth", "short", ("slotline_queue_depth", "{{queue}}"), span=8).description(
            "Jobs that wait, by queue."
        ),
        _series(
            "Attempts ended in the last hour",
            "short",
            ("increase(slotline_attempts_total[1h])", "{{cause}}"),
            span=8,
        ).description("Ended attempts by cause: infrastructure, user, preemption, or a good end."),
    ]


def _job() -> list[Any]:
    histogram = f"sum by (le) (rate(slotline_step_seconds_bucket{_JOB}[$__rate_interval]))"
    action = "sum by (stage, action) (rate(slotline_action_seconds_{}{}[$__rate_interval]))"
    mean = f"{action.format('sum', _JOB)} / ({action.format('count', _JOB)} > 0)"
    return [
        _series("Loss", "short", (f"max by (job) (slotline_train_loss{_JOB})", "loss"), span=8),
        _series(
            "Step time",
            "s",
            (f"histogram_quantile(0.5, {histogram})", "median"),
            (f"histogram_quantile(0.95, {histogram})", "95 %"),
            span=8,
        ),
        _series(
            "Makespan: planned and measured",
            "s",
            (f"max by (job) (slotline_plan_makespan_seconds{_JOB})", "planned"),
            (f"max by (job) (slotline_makespan_seconds{_JOB})", "measured"),
            span=8,
        ),
        _series("Seconds per action", "s", (mean, "{{stage}} {{action}}"), span=8).description(
            "Mean length of a slot in the profiled steps, by stage and action."
        ),
        _series(
            "Bubble: planned and measured",
            "percentunit",
            (f"max by (job) (slotline_plan_bubble_ratio{_JOB})", "planned"),
            (f"max by (job) (slotline_bubble_ratio{_JOB})", "measured"),
            span=8,
        ),
        _series(
            "Exposed transfer time",
            "s",
            (f"max by (job) (slotline_exposed_transfer_seconds{_JOB})", "exposed"),
            span=4,
        ).description(
            "Seconds of a step in which a mesh was idle while its transfers ran, summed over meshes."
        ),
        _series(
            "Overlap", "percentunit", (f"max by (job) (slotline_overlap_ratio{_JOB})", "overlap"), span=4
        ).description("Share of transfer time that computation hid."),
    ]


def _slots() -> list[Any]:
    return [
        _stat("Profiled step", "none", f"max(slotline_profiled_step{_JOB})"),
        _stat("Length of the profiled step", "s", _LENGTH),
        _stat("Slots not shown", "none", f"max(slotline_profiled_slots_dropped{_JOB})"),
        _busiest(),
        _timeline(),
    ]


def _timeline() -> statetimeline.Panel:
    """Two instant tables, the start and the end of every slot in ms, are joined and split by lane."""
    times = ["Value #start", "Value #end"]
    columns = ["row", *times, "slot"]
    transformations = [
        ("merge", {}),
        ("sortBy", {"sort": [{"field": "row", "desc": False}]}),
        (
            "organize",
            {
                # before the conversion: by the name Time, Grafana leaves out every field of type time
                "excludeByName": {"Time": True, "edge": True},
                "indexByName": {name: place for place, name in enumerate(columns)},
                "renameByName": {"slot": "Value"},
            },
        ),
        (
            "convertFieldType",
            {"conversions": [{"targetField": name, "destinationType": "time"} for name in times]},
        ),
    ]
    return (
        slot_timeline(
            "Slots of the last profiled step, stretched over the time range", _SOURCE, transformations
        )
        .with_target(_query(_stretched(_START), "start", table=True))
        .with_target(_query(_stretched(_END), "end", table=True))
    )


def _stretched(times: str) -> str:
    """Times within the step as milliseconds within the dashboard's range, labelled with lane and slot."""
    first = f"scalar(min({_START}))"
    place = f"$__from + ($__to - $__from) * ({times} - {first}) / scalar({_LENGTH})"
    row = f'label_join({place}, "row", " ", "mesh", "lane")'
    action = f'label_join({row}, "operation", "", "action", "microbatch")'
    slot = f'label_join({action}, "slot", " ", "operation", "stage")'
    return f"max by (row, slot, edge) ({slot})"


def _busiest() -> bargauge.Panel:
    return (
        bargauge.Panel()
        .title("Compute time of each mesh")
        .datasource(_SOURCE)
        .unit("s")
        .min(0)
        .span(12)
        .height(4)
        .orientation(common_models.VizOrientation.HORIZONTAL)
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.FIXED).fixed_color("#3274d9"))
        .with_target(
            _query(
                f"sum by (mesh) ({_DURATION.replace(_JOB, _COMPUTE, 1)})", "mesh", "{{mesh}}", instant=True
            )
        )
    )


_COMPUTE = '{job="$job", lane="compute"}'


def _stat(title: str, unit: str, expression: str) -> stat.Panel:
    return (
        stat.Panel()
        .title(title)
        .datasource(_SOURCE)
        .unit(unit)
        .span(4)
        .height(4)
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .color_mode(common_models.BigValueColorMode.NONE)
        .with_target(_query(expression, "A", instant=True))
    )


def _series(
    title: str, unit: str, *queries: tuple[str, str], span: int, stacked: bool = False
) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .title(title)
        .datasource(_SOURCE)
        .unit(unit)
        .span(span)
        .height(8)
        .line_width(1)
        .fill_opacity(30 if stacked else 5)
        .show_points(common_models.VisibilityMode.AUTO)
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
        .legend(common.VizLegendOptions().show_legend(True))
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    for number, (expression, legend) in enumerate(queries):
        panel = panel.with_target(_query(expression, chr(ord("A") + number), legend))
    return panel


def _query(
    expression: str, name: str, legend: str | None = None, *, instant: bool = False, table: bool = False
) -> prometheus.Dataquery:
    query = prometheus.Dataquery().datasource(_SOURCE).ref_id(name).expr(expression)
    if legend is not None:
        query = query.legend_format(legend)
    if table:
        query = query.format(prometheus_models.PromQueryFormat.TABLE)
    return query.instant() if instant or table else query.range()


def texts() -> dict[str, str]:
    """The JSON that Grafana imports, by file name."""
    boards = {"slotline.json": build(), "slotline-steps.json": steps.build()}
    return {
        name: json.dumps(board, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
        for name, board in boards.items()
    }


if __name__ == "__main__":
    for name, text in texts().items():
        (HERE / name).write_text(text)
        (CHART_FILES / name).write_text(text)
    (CHART_FILES / "rules.yml").write_text((HERE / "rules.yml").read_text())
