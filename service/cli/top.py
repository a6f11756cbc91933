"""`slotline top`: a live overview of clusters, queues, jobs and nodes, redrawn every second until Ctrl-C.

Reads by service.client.client only; an unreachable server leaves the last overview on the screen, and is asked again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from service.cli.jobs import state_text
from service.cli.nodes import state_text as node_state_text
from service.cli.output import JsonOption, borderless_table, models_to_json, out, print_json
from service.client.client import Client, ClientError
from service.schemas.clusters import AcceleratorsView, ClusterView
from service.schemas.jobs import JobSummary
from service.schemas.queues import QueueView
from service.spec.states import JobState, NodeState

_MAX_JOBS = 20
_REFRESH_EVERY_S = 1.0
_ACTIVE_STATES = (JobState.RUNNING, JobState.STARTING, JobState.CANCELLING, JobState.RECOVERING)
app = typer.Typer()


@dataclass(frozen=True)
class Overview:
    """One reading of the server; running jobs stand before the newest ones."""

    cluster: ClusterView
    queues: Sequence[QueueView]
    jobs: Sequence[JobSummary]


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print once and end")] = False,
    as_json: JsonOption = False,
) -> None:
    """Accelerators, queues, jobs and their steps a second, nodes; renewed every second, Ctrl-C ends it."""
    client = Client()
    if as_json:
        print_json(_overview_json(_read_overview(client)))
    elif once or not sys.stdout.isatty():
        out.print(render_overview(_read_overview(client)))
    else:
        _show_live(client)


def _show_live(client: Client) -> None:
    seen = _read_overview(client)
    with Live(render_overview(seen), console=out, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(_REFRESH_EVERY_S)
                try:
                    seen = _read_overview(client)
                    live.update(render_overview(seen), refresh=True)
                except ClientError as error:
                    if not error.temporary:
                        raise
                    notice = Text(f"{error}; trying again", style="red")
                    live.update(Group(notice, render_overview(seen)), refresh=True)
        except KeyboardInterrupt:
            return


def _read_overview(client: Client) -> Overview:
    """Jobs that hold accelerators or recover stand first, then the newest of all states."""
    active = list(client.jobs(state=_ACTIVE_STATES, limit=_MAX_JOBS))
    known = {job.id for job in active}
    newest = [job for job in client.jobs(limit=_MAX_JOBS) if job.id not in known]
    return Overview(client.cluster(), client.queues(), [*active, *newest][:_MAX_JOBS])


def _overview_json(seen: Overview) -> dict[str, Any]:
    return {
        "cluster": seen.cluster.model_dump(mode="json"),
        "queues": models_to_json(seen.queues),
        "jobs": models_to_json(seen.jobs),
    }


def render_overview(seen: Overview) -> RenderableType:
    """Tables of accelerators, queues, jobs and nodes."""
    several = len(seen.cluster.clusters) > 1
    return Group(
        _accelerators_table(seen.cluster),
        _queues_table(seen.queues, several=several),
        _jobs_table(seen.jobs),
        _nodes_table(seen.cluster, several=several),
    )


def _accelerators_table(cluster: ClusterView) -> RenderableType:
    if len(cluster.clusters) < 2:
        away = None if cluster.available else cluster.error or "the cluster has not been seen yet"
        return _free_accelerators_text(cluster.accelerators, away)
    table = _new_table(("cluster", "accelerators"), numbers=())
    for member in cluster.clusters:
        accelerators = [row for row in cluster.accelerators if row.cluster == member.name]
        away = None if member.available else member.error or "it has not been seen yet"
        table.add_row(escape(member.name), _free_accelerators_text(accelerators, away))
    return table


def _free_accelerators_text(accelerators: Sequence[AcceleratorsView], away: str | None) -> Text:
    if away is not None:
        return Text(away, style="red")
    parts = [
        f"{kind.free} of {kind.total} {kind.resource} free"
        + (f" ({kind.left_out} left out)" if kind.left_out else "")
        for kind in accelerators
        if kind.total
    ]
    return Text(", ".join(parts) or "no accelerators", style="bold")


def _queues_table(queues: Sequence[QueueView], *, several: bool) -> Table:
    where = ("cluster",) if several else ()
    table = _new_table(
        ("queue", *where, "used", "quota", "waiting", "next in line"), numbers=("used", "quota", "waiting")
    )
    for queue in queues:
        first = queue.waiting[0] if queue.waiting else None
        line = (
            "" if first is None else f"{first.name}: {first.message or first.reason or 'not looked at yet'}"
        )
        quota = "-" if queue.quota is None else str(queue.quota)
        on = (queue.cluster or "?",) if several else ()
        table.add_row(queue.name, *on, str(queue.used), quota, str(queue.depth), escape(line))
    return table


def _jobs_table(jobs: Sequence[JobSummary]) -> Table:
    titles = ("job", "name", "owner", "queue", "state", "step", "steps/s", "loss")
    table = _new_table(titles, numbers=("step", "steps/s", "loss"))
    for job in jobs:
        done = job.progress
        moves = job.state is JobState.RUNNING and done.step_s
        table.add_row(
            job.id,
            escape(job.name),
            escape(job.owner),
            job.queue,
            state_text(job),
            f"{done.step}/{done.steps}",
            f"{1 / done.step_s:.3g}" if moves and done.step_s else "",
            "" if done.loss is None else f"{done.loss:.4g}",
        )
    return table


def _nodes_table(cluster: ClusterView, *, several: bool) -> Table:
    where = ("cluster",) if several else ()
    table = _new_table(("node", *where, "state and reason", "free", "address", "offers"), numbers=("free",))
    for node in cluster.nodes:
        shown = [
            f"{amount:g} {name}"
            for name, amount in sorted(node.resources.items())
            if not name.startswith(("node:", "object_store", "memory"))
        ]
        on = (escape(node.cluster),) if several else ()
        free = str(sum(kind.free for kind in node.accelerators)) if node.accelerators else ""
        state = Text(node_state_text(node), style="" if node.state is NodeState.READY else "yellow")
        table.add_row(escape(node.name), *on, state, free, node.address, escape(", ".join(shown)))
    return table


def _new_table(titles: Sequence[str], *, numbers: Sequence[str]) -> Table:
    table = borderless_table()
    for title in titles:
        whole = title in ("job", "state", "step")  # an id in two lines is none that can be copied
        width = {"name": 12, "owner": 10, "queue": 8}.get(title) if out.width < 100 else None
        justify: Literal["right", "left"] = "right" if title in numbers else "left"
        table.add_column(title, justify=justify, overflow="fold", no_wrap=whole, max_width=width)
    return table
