"""The dashboard of one profiled step: every slot at its time in the step, the plan above what was measured.

Its axis begins at 1970 and has a millisecond for each microsecond of the step, so that zoom is Grafana's own and what
the axis says is true. Prometheus is asked for another time than the axis shows: `$at`, which links to here bring along.
"""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import dashboard, statetimeline, table
from grafana_foundation_sdk.models import dashboard as models
from panels import SOURCE, board, data_link, number, page_links, query, slot_timeline, variable, with_rows

_JOB = '{job="$job"}'
_LANES = '{job="$job", lane=~"$lanes"}'
_LABELS = ("line", "slot", "edge")

# A job's driver may linger beside that of its next attempt: only the newest step's slots are drawn.
_NEWEST = f"on (instance) topk(1, slotline_slots_start_timestamp_seconds{_JOB} @ $at)"


def build() -> models.Dashboard:
    built = (
        board(
            "Slotline: timeline",
            "slotline-timeline",
            "The last profiled step before a time, slot by slot. Open it from the job's dashboard or page.",
        )
        .time("1970-01-01T00:00:00.000Z", "1970-01-01T00:01:00.000Z")
        .timezone("utc")
        .with_variable(
            dashboard.TextBoxVariable("at")
            .label("As of (Unix seconds)")
            .description("The step that was the last one profiled at this time; links to here set it.")
            .default_value("0")
        )
        .with_variable(_found("name", "Job", "max by (name) (slotline_job_info @ $at)"))
        .with_variable(_found("job", "Id", 'max by (job) (slotline_job_info{name="$name"} @ $at)'))
        .with_variable(
            dashboard.CustomVariable("lanes")
            .label("Lanes")
            .values("all : .+, compute : compute, transfers : (send|recv):.+")
            .current(models.VariableOption(text="all", value=".+", selected=True))
        )
        .with_variable(
            _found("url", "Control plane", "max by (url) (slotline_control_plane_info @ $at)").hide(
                models.VariableHide.HIDE_VARIABLE
            )
        )
        .link(
            dashboard.DashboardLink("The job")
            .type(models.DashboardLinkType.LINK)
            .url(
                "/d/slotline-job?var-name=${name}&var-job=${job}&${datasource:queryparam}&from=now-30m&to=now"
            )
        )
    )
    return with_rows(page_links(built), [("Profiled step of $name", [*_facts(), _timeline(), _numbers()])])


def _found(name: str, label: str, expression: str) -> dashboard.QueryVariable:
    """A choice among a label's values at `$at`: label_values would look at the axis's time."""
    return variable(name, label, f"query_result({expression})").regex(f'/{name}="([^"]*)"/')


def _facts() -> list[Any]:
    whole = f"?from=0&to={'0' * 24}${{__value.raw}}&${{__all_variables}}"

    def of_job(name: str) -> str:
        return f"max by (job) (slotline_{name}{_JOB} @ $at)"

    return [
        number(
            "Step", "none", f"max by (job) (slotline_slots_step{_JOB} @ $at)", about="Whose slots these are."
        ),
        number(
            "Length",
            "µs",
            f"round(1e6 * {of_job('profiled_step_seconds')})",
            about="From the first slot to the last, REDUCE and STEP too. Click: the axis shows just that.",
            span=5,
        ).data_links([data_link("Show the whole step", whole)]),
        number(
            "Makespan by the plan",
            "µs",
            f"round(1e6 * {of_job('plan_makespan_seconds')})",
            about="From the first forward to the end of the last backward.",
            span=5,
        ),
        number(
            "Measured slots not shown",
            "none",
            of_job("profiled_slots_dropped"),
            about="Too many for Prometheus: the last ones of the step. They are in all sums, and on the job's page.",
            span=5,
        ),
        number(
            "Planned slots not shown",
            "none",
            of_job("plan_slots_dropped"),
            about="Too many for Prometheus: the last ones of the plan.",
            span=5,
        ),
    ]


def _times() -> tuple[str, str, str, str]:
    """Start and length in microseconds, of measured and of planned slots, each with all its labels."""
    first = f"on (job, instance) group_left slotline_slots_start_timestamp_seconds{_JOB} @ $at"
    return (
        f"1e6 * (slotline_slot_start_timestamp_seconds{_LANES} @ $at - {first}) and {_NEWEST}",
        f"1e6 * slotline_slot_duration_seconds{_LANES} @ $at and {_NEWEST}",
        f"1e6 * slotline_plan_slot_start_seconds{_LANES} @ $at and {_NEWEST}",
        f"1e6 * slotline_plan_slot_duration_seconds{_LANES} @ $at and {_NEWEST}",
    )


def _named(expression: str, kind: str) -> str:
    """With the labels `line`, such as `m02 compute run`, and `slot`, such as `F3 s2`."""
    line = f'label_replace({expression}, "line", "$1 {kind}", "row", "(.+)")'
    action = f'label_join({line}, "operation", "", "action", "microbatch")'
    slot = f'label_join({action}, "slot", " ", "operation", "stage")'
    return f"max by ({', '.join(_LABELS)}) ({slot})"


def _both(measured: str, planned: str) -> str:
    return f"{_named(planned, 'plan')} or {_named(measured, 'run')}"


def _timeline() -> statetimeline.Panel:
    """Two instant tables, the start and the end of every slot, are joined and split by lane.

    A block ends a microsecond early: Unix times round to a quarter of one, and an end that rounds to after the next
    start would blank the next block.
    """
    run_start, run_length, plan_start, plan_length = _times()

    def end(start: str, length: str) -> str:
        return f"round(({start}) + clamp_min(({length}) - 1, 0.5))"

    times = ["Value #start", "Value #end"]
    columns = ["line", *times, "slot"]
    transformations = [
        ("merge", {}),
        ("sortBy", {"sort": [{"field": "line", "desc": False}]}),
        (
            "organize",
            {
                # before the conversion: by the name Time, Grafana leaves out every field of type time
                "excludeByName": {"Time": True, "edge": True},
                "indexByName": {name: place for place, name in enumerate(columns)},
                "renameByName": {"slot": "Value", "line": "row"},
            },
        ),
        (
            "convertFieldType",
            {"conversions": [{"targetField": name, "destinationType": "time"} for name in times]},
        ),
    ]
    starts = _both(f"round({run_start})", f"round({plan_start})")
    ends = _both(end(run_start, run_length), end(plan_start, plan_length))
    return (
        slot_timeline("Slots, the plan above what was measured", SOURCE, transformations)
        .with_target(query(starts, "start", as_table=True))
        .with_target(query(ends, "end", as_table=True))
    )


def _numbers() -> table.Panel:
    """The same in numbers: start and length of each slot."""
    run_start, run_length, plan_start, plan_length = _times()
    columns = {"line": "Lane", "slot": "Slot", "Value #start": "Start", "Value #length": "Length"}
    panel = (
        table.Panel()
        .title("The same in numbers")
        .description("Start and length of each slot in microseconds from the start of the step.")
        .datasource(SOURCE)
        .unit("µs")
        .filterable(True)
        .span(24)
        .height(12)
        .with_target(query(_both(run_start, plan_start), "start", as_table=True))
        .with_target(query(_both(run_length, plan_length), "length", as_table=True))
    )
    for name, options in (
        ("merge", {}),
        ("filterFieldsByName", {"include": {"names": list(columns)}}),
        (
            "organize",
            {
                "indexByName": {name: place for place, name in enumerate(columns)},
                "renameByName": columns,
            },
        ),
        ("sortBy", {"sort": [{"field": "Lane", "desc": False}]}),
    ):
        panel = panel.with_transformation(models.DataTransformerConfig(name, options=options))
    return panel
