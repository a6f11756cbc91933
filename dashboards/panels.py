"""What the dashboards are made of: panels, queries, variables and links as all of them have them."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

SOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
TAGS = ["slotline"]
Query = tuple[str, str]
"""PromQL, and what its series are called."""

_COLOURS = {
    "F": "#3274d9",
    "B": "#e0752d",
    "I": "#e5a823",
    "W": "#a352cc",
    "(SEND|RECV)_F": "#8ab8ff",
    "(SEND|RECV)_B": "#ffb37a",
    "(REDUCE|STEP)": "#8e9aab",
}


def board(title: str, uid: str, description: str) -> dashboard.Dashboard:
    """A dashboard over Prometheus, with links to its sisters."""
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(TAGS)
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(sisters())
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )


def sisters() -> dashboard.DashboardLink:
    """To the other dashboards. Without the time: the axis of the timelines is in January 1970."""
    return (
        dashboard.DashboardLink("Slotline")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags(TAGS)
        .as_dropdown(True)
    )


def with_rows(built: dashboard.Dashboard, rows: list[tuple[str, list[Any]]]) -> models.Dashboard:
    for title, panels in rows:
        built = built.with_row(dashboard.Row(title))
        for panel in panels:
            built = built.with_panel(panel)
    return built.build()


def variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    """A choice of what `query` finds."""
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


def marks(name: str, expression: str, title: str, colour: str) -> dashboard.AnnotationQuery:
    """Marks over all curves, at the times that are the values of `expression`, in seconds since 1970."""
    return (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(SOURCE)
        .enable(True)
        .icon_color(colour)
        .expr(f"1000 * {expression}")
        .step("5s")
        .title_format(title)
        .use_value_for_time(True)
    )


def page_links(built: dashboard.Dashboard) -> dashboard.Dashboard:
    """To the job's own page and to its trace; `$url` is the control plane's address."""
    for title, path in (("Job page", ""), ("Trace (Perfetto)", "/api/v1/jobs/${job}/timeline?format=chrome")):
        url = "${url}" + (path or "/jobs/${job}")
        built = built.link(
            dashboard.DashboardLink(title).type(models.DashboardLinkType.LINK).url(url).target_blank(True)
        )
    return built


def data_link(title: str, url: str) -> dashboard.DashboardLink:
    """A link of a value; `url` may use ${__value.raw} and ${__data.fields.name}."""
    return dashboard.DashboardLink(title).type(models.DashboardLinkType.LINK).url(url)


def query(
    expression: str,
    name: str,
    legend: str | None = None,
    *,
    instant: bool = False,
    as_table: bool = False,
    exemplars: bool = False,
) -> prometheus.Dataquery:
    made = prometheus.Dataquery().datasource(SOURCE).ref_id(name).expr(expression)
    if exemplars:
        made = made.exemplar(True)
    if legend is not None:
        made = made.legend_format(legend)
    if as_table:
        made = made.format(prometheus_models.PromQueryFormat.TABLE)
    return made.instant() if instant or as_table else made.range()


def curves(
    title: str,
    unit: str,
    *queries: Query,
    about: str,
    span: int = 8,
    stacked: bool = False,
    from_zero: bool = True,
    exemplars: bool = False,
) -> timeseries.Panel:
    """Lines over time; a line a series of each query, and points that lead to traces where the first has `exemplars`."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .span(span)
        .height(8)
        .line_width(1)
        .fill_opacity(30 if stacked else 5)
        .show_points(common_models.VisibilityMode.AUTO)
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
        .legend(common.VizLegendOptions().show_legend(True))
    )
    if from_zero:
        panel = panel.min(0)
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    return _asked(panel, queries, exemplars=exemplars)


def number(title: str, unit: str, expression: str, *, about: str, span: int = 4) -> stat.Panel:
    """The value of now, large."""
    return (
        stat.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .span(span)
        .height(4)
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .color_mode(common_models.BigValueColorMode.NONE)
        .with_target(query(expression, "A", title, instant=True))
    )


def bars(
    title: str, unit: str, *queries: Query, about: str, span: int = 8, height: int = 8
) -> bargauge.Panel:
    """The values of now beside each other."""
    panel = (
        bargauge.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .span(span)
        .height(height)
        .orientation(common_models.VizOrientation.HORIZONTAL)
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.FIXED).fixed_color("#3274d9"))
    )
    return _asked(panel, queries, instant=True)


def rows_of(
    title: str, *expressions: str, columns: dict[str, str], about: str, span: int = 24, height: int = 8
) -> table.Panel:
    """A table of the labels and values of now; `columns` says what is shown, in order, under which name."""
    panel = table.Panel().title(title).description(about).datasource(SOURCE).span(span).height(height)
    for place, expression in enumerate(expressions):
        panel = panel.with_target(query(expression, chr(ord("A") + place), "", as_table=True))
    options = {
        "indexByName": {name: place for place, name in enumerate(columns)},
        "renameByName": {name: shown for name, shown in columns.items() if shown},
    }
    keep = {"include": {"names": list(columns)}}
    return (
        panel.with_transformation(models.DataTransformerConfig("merge", options={}))
        .with_transformation(models.DataTransformerConfig("filterFieldsByName", options=keep))
        .with_transformation(models.DataTransformerConfig("organize", options=options))
    )


def _asked(panel: Any, queries: tuple[Query, ...], *, instant: bool = False, exemplars: bool = False) -> Any:
    for place, (expression, legend) in enumerate(queries):
        name = chr(ord("A") + place)
        panel = panel.with_target(
            query(expression, name, legend, instant=instant, exemplars=exemplars and place == 0)
        )
    return panel


MICROSECONDS = "time:x [µs]"
"""Slots stand at as many milliseconds after 1970 as they are microseconds after the step's start: this shows them so."""


def slot_timeline(
    title: str, source: common_models.DataSourceRef, transformations: list[tuple[str, dict[str, Any]]]
) -> statetimeline.Panel:
    """A panel for blocks that end by a second time field; `transformations` leave one frame a lane.

    A lane's frame has the times `start` and `end` and the text `Value`, such as `F3 s0`, and the label `row`. Times
    are not stretched: Grafana's finest unit, a millisecond, is a microsecond of the step, and zoom is Grafana's own.
    """
    mappings = [
        models.RegexMap(
            models.DashboardRegexMapOptions(
                f"/^{action}[0-9]* /", models.ValueMappingResult(color=colour, index=index)
            )
        )
        for index, (action, colour) in enumerate(_COLOURS.items())
    ]
    panel = (
        statetimeline.Panel()
        .title(title)
        .description(
            "Each row is a lane of a mesh in the order of the pipeline, the planned lane above the measured one; each "
            "block is an action with its microbatch and stage. The axis is microseconds from the start of the step."
        )
        .datasource(source)
        .span(24)
        .height(30)
        .display_name("${__field.labels.row}")
        .mappings(mappings)
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.FIXED).fixed_color("#8e9aab"))
        .override_by_field_type("time", [models.DynamicConfigValue("unit", MICROSECONDS)])
        .merge_values(False)
        .show_value(common_models.VisibilityMode.AUTO)
        .row_height(0.85)
        .line_width(0)
        .fill_opacity(90)
        .per_page(36)
        .legend(common.VizLegendOptions().show_legend(False))
    )
    by_lane = {"fields": ["row"], "keepFields": False, "naming": {"asLabels": True}}
    for name, options in [*transformations, ("partitionByValues", by_lane)]:
        panel = panel.with_transformation(models.DataTransformerConfig(name, options=options))
    return panel
