"""A plan as a summary that a person reads in a terminal."""

from __future__ import annotations

from service.scheduler.kernels import TOLERANCE
from service.scheduler.model.spec import PipelineSpec
from service.scheduler.plan import Plan


def summary(spec: PipelineSpec, plan: Plan) -> str:
    """Makespan, bound, bubble and, for each mesh, memory and exposed transfer time."""
    gap = plan.makespan_s / plan.lower_bound_s - 1.0 if plan.lower_bound_s > 0 else None
    if plan.proven_optimal:
        quality = "proven optimal"
    elif gap is None:
        quality = "no bound"
    else:
        quality = f"at most {gap:.2%} above the optimum"
    quality += "".join(f"; {note}" for note in plan.notes)
    if plan.truncated:
        quality += ", search cut short by the deadline"
    name = plan.schedule if plan.schedule == plan.chosen else f"{plan.schedule} (chose {plan.chosen})"
    lines = [
        f"schedule      {name}",
        f"size          {len(spec.stages)} stages on {len(spec.meshes)} meshes, {spec.microbatches} microbatches",
        f"makespan      {plan.makespan_s:g} s ({quality}; lower bound {plan.lower_bound_s:g} s)",
        *_reached(plan),
        f"span          {plan.span_s:g} s",
        f"bubble ratio  {plan.bubble_ratio:.1%}",
        f"overlap       {plan.overlap_ratio:.1%} of the transfer time is hidden",
        "",
    ]
    rows = [("mesh", "activations", "limit", "receive buffers", "compute s", "exposed transfer s")]
    for mesh, given in zip(plan.meshes, spec.meshes, strict=True):
        limit = given.activation_limit_bytes
        rows.append(
            (
                mesh.name,
                str(mesh.peak_activation_bytes),
                "-" if limit is None else str(limit),
                str(mesh.peak_receive_buffers),
                f"{mesh.compute_s:g}",
                f"{mesh.exposed_transfer_s:g}",
            )
        )
    return "\n".join(lines + columns(rows)) + "\n"


def _reached(plan: Plan) -> list[str]:
    if plan.programs_makespan_s is None or plan.programs_makespan_s <= plan.makespan_s * (1 + TOLERANCE):
        return []
    return [
        f"programs      {plan.programs_makespan_s:g} s: with contention none transfers of one pair overlap in the plan, "
        "programs run them one by one"
    ]


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows with aligned columns, the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [
            cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
