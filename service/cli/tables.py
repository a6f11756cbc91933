"""Jobs, timelines and the cluster for eyes: the lines and tables that verbs print."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from service.api.schemas import (
    EvaluationView,
    JobSummary,
    JobView,
    TimelineSide,
    TimelineView,
)
from service.cli.output import out, print_json
from service.cluster_settings import DEFAULT

_COLOURS = {"SUCCEEDED": "green", "FAILED": "red", "RUNNING": "cyan", "CANCELLED": "yellow"}


def show_job(job: JobView, url: str, *, as_json: bool) -> None:
    """Print a job of the server at `url`: its state, its attempts, the address of its page."""
    if as_json:
        print_json(job.model_dump(mode="json"))
        return
    out.print(_job_line(job), soft_wrap=True)
    for attempt in job.attempts:
        reason = f" {attempt.reason}: {attempt.message}" if attempt.reason else ""
        where = "" if attempt.cluster == DEFAULT else f" on {attempt.cluster}"
        out.print(f"  attempt {attempt.number} {attempt.state}{where}{reason}", soft_wrap=True, markup=False)
    if (best := job.best_checkpoint) is not None:
        found = f"  best checkpoint: {best.metric} {best.value:.4g} after step {best.step}, {best.uri}"
        out.print(found, soft_wrap=True, markup=False)
    out.print(f"  {url}/jobs/{job.id}", soft_wrap=True)


def evaluations_table(evaluations: Sequence[EvaluationView]) -> Table:
    """A row for each evaluation, a column for each metric."""
    names = list(dict.fromkeys(name for one in evaluations for name in one.metrics))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("step", "loss", *map(escape, names), "samples", "seconds"):
        table.add_column(title, justify="right")
    for one in evaluations:
        numbers = [one.loss, *(one.metrics.get(name) for name in names)]
        cells = ["" if number is None else f"{number:.4g}" for number in numbers]
        seconds = "" if one.evaluation_s is None else f"{one.evaluation_s:.2f}"
        table.add_row(str(one.step), *cells, str(one.samples), seconds)
    return table


def jobs_table(jobs: Sequence[JobSummary]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, collapse_padding=True)
    for title in ("job", "name", "queue", "state", "step", "loss", "why"):
        whole = title in ("job", "state", "step", "loss")
        width = {"name": 14, "queue": 8}.get(title) if out.width < 100 else None
        table.add_column(title, overflow="fold", no_wrap=whole, max_width=width)
    for job in jobs:
        done = job.progress
        table.add_row(
            job.id,
            job.name,
            job.queue,
            state_text(job),
            f"{done.step}/{done.steps}",
            "" if done.loss is None else f"{done.loss:.4g}",
            escape((job.message or job.reason or "")[:120]),
        )
    return table


def timeline_table(view: TimelineView) -> Table:
    """One row for the planned and one for the measured side, where they are there."""
    table = Table(title=f"{view.job_id}, step {view.step}")
    for title in ("", "makespan", "slots", "compute"):
        table.add_column(title, justify="left" if not title else "right")
    for name, side in (("planned", view.planned), ("measured", view.measured)):
        if side is not None:
            table.add_row(name, *_cells(side))
    return table


def _cells(side: TimelineSide) -> tuple[str, str, str]:
    compute = sum(slot.end_s - slot.start_s for slot in side.slots if slot.lane == "compute")
    return f"{1e3 * side.makespan_s:.2f} ms", str(len(side.slots)), f"{1e3 * compute:.2f} ms"


def _job_line(job: JobView) -> str:
    why = ": ".join(part for part in (job.reason, job.message) if part)
    done = job.progress
    loss = "" if done.loss is None else f", loss {done.loss:.4g}"
    loss += "".join(f", {name} {value:.4g}" for name, value in done.metrics.items() if value is not None)
    owner = f" of {escape(job.owner)}" if job.owner else ""
    line = f"{job.id} {job.name}{owner} [{_colour(job)}]{job.state}[/] step {done.step}/{done.steps}{loss}"
    return f"{line}  {escape(why)}" if why else line


def state_text(job: JobSummary) -> str:
    """The job's state in its colour."""
    return f"[{_colour(job)}]{job.state}[/]"


def _colour(job: JobSummary) -> str:
    return _COLOURS.get(job.state, "default")
