"""Renders a plan in one of FORMATS: JSON, CSV, tables, Chrome trace, SVG or text. The entry point of views/."""

from __future__ import annotations

import json

from service.scheduler.problem.spec import PipelineSpec, SpecError, is_chain, one_stage_per_mesh
from service.scheduler.programs.plan import Plan
from service.scheduler.views.chrome import chrome_trace
from service.scheduler.views.text_tables import ComputeOrder, event_table, plan_summary, slot_table

FORMATS = ("json", "csv", "table", "events", "chrome", "svg", "text")


def render(spec: PipelineSpec, plan: Plan, format: str) -> str:
    """The plan in a format of FORMATS; raises SpecError where a format cannot show this plan."""
    if format == "json":
        return plan.model_dump_json() + "\n"
    if format == "csv":
        return "".join(",".join(actions) + "\n" for actions in plan_orders(spec, plan).values())
    if format == "table":
        return slot_table(_stage_orders(spec, plan))
    if format == "events":
        return json.dumps(event_table(_stage_orders(spec, plan)), separators=(",", ":")) + "\n"
    if format == "chrome":
        trace = chrome_trace({"": (slot.to_json() for slot in plan.slots)})
        return json.dumps(trace, separators=(",", ":")) + "\n"
    if format == "svg":
        from service.scheduler.views.svg import plan_svg  # brings XML and, with it, Python's HTTP client

        return plan_svg(spec, plan)
    if format == "text":
        return plan_summary(spec, plan)
    raise SpecError(f"format {format!r} does not exist: use one of {', '.join(FORMATS)}")


def plan_orders(spec: PipelineSpec, plan: Plan) -> dict[str, list[str]]:
    """The compute order of each mesh in torch's actions: the `orders` of a spec with schedule csv."""
    index = {stage.name: i for i, stage in enumerate(spec.stages)}
    orders: dict[str, list[str]] = {mesh.name: [] for mesh in spec.meshes}
    for slot in plan.slots:
        if slot.lane == "compute":
            orders[slot.mesh].append(f"{index[slot.stage]}{slot.action}{slot.microbatch}")
    return orders


def _stage_orders(spec: PipelineSpec, plan: Plan) -> list[ComputeOrder]:
    """(action, microbatch) of each stage of a chain with one stage a mesh."""
    if not (is_chain(spec) and one_stage_per_mesh(spec)):
        raise SpecError(
            "slot and event tables are for chains with one stage a mesh: use --format json, svg or csv"
        )
    orders: dict[str, list[tuple[str, int]]] = {stage.name: [] for stage in spec.stages}
    for slot in plan.slots:
        if slot.lane == "compute":
            orders[slot.stage].append((slot.action, slot.microbatch))
    return list(orders.values())
