"""What both dashboards draw alike: the slots of one step as a state timeline, one row a lane."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, statetimeline
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

_COLOURS = {
    "F": "#3274d9",
    "B": "#e0752d",
    "I": "#e5a823",
    "W": "#a352cc",
    "(SEND|RECV)_F": "#8ab8ff",
    "(SEND|RECV)_B": "#ffb37a",
    "(REDUCE|STEP)": "#8e9aab",
}


def slot_timeline(
    title: str, source: common_models.DataSourceRef, transformations: list[tuple[str, dict[str, Any]]]
) -> statetimeline.Panel:
    """A panel for blocks that end by a second time field; `transformations` leave one frame a lane.

    A lane's frame has the times `start` and `end` and the text `Value`, such as `F3 s0`, and
    the label `row`. A step lasts milliseconds and a time range minutes: queries stretch the
    step over the range.
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
            "Each row is a lane of a mesh, each block an action with its microbatch and stage. The whole step "
            "fills the time range, so the axis is no clock: the length stands above, exact times on the job's page."
        )
        .datasource(source)
        .span(24)
        .height(16)
        .display_name("${__field.labels.row}")
        .mappings(mappings)
        .color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.FIXED).fixed_color("#8e9aab"))
        .merge_values(False)
        .show_value(common_models.VisibilityMode.AUTO)
        .row_height(0.85)
        .line_width(0)
        .fill_opacity(90)
        .per_page(60)
        .legend(common.VizLegendOptions().show_legend(False))
    )
    by_lane = {"fields": ["row"], "keepFields": False, "naming": {"asLabels": True}}
    for name, options in [*transformations, ("partitionByValues", by_lane)]:
        panel = panel.with_transformation(models.DataTransformerConfig(name, options=options))
    return panel
