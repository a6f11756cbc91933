"""`slotline nodes` and `slotline node drain|exclude|include NAME`: nodes with their states, and what operators do to them.

Calls of service.client.client only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.markup import escape

from service.cli.output import (
    Completions,
    JsonOption,
    borderless_table,
    complete_from,
    models_to_json,
    out,
    pattern_callback,
    print_json,
)
from service.client.client import Client
from service.schemas.clusters import NodeView
from service.spec.names import NAME_PATTERN
from service.spec.states import NodeState

_JOBS_NAMED = 3
app = typer.Typer()
node_app = typer.Typer(
    help="Have a node take no work, for operators; it holds after restarts.", no_args_is_help=True
)


def _node_completions(client: Client) -> Completions:
    return [(node.name, node.state) for node in client.nodes()]


NodeArgument = Annotated[
    str,
    typer.Argument(
        metavar="NODE",
        help="Its name, Kubernetes node, host name, address or Ray's id",
        autocompletion=complete_from(_node_completions),
    ),
]
ReasonOption = Annotated[str, typer.Option(help="Why, for those who meet it")]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        callback=pattern_callback(NAME_PATTERN, "a cluster's name"), help="The cluster, where several are"
    ),
]


@app.command()
def nodes(cluster: ClusterOption = None, as_json: JsonOption = False) -> None:
    """Nodes: state, accelerators that are used and free, jobs, labels."""
    _print_nodes(Client().nodes(cluster), as_json=as_json)


@node_app.command()
def drain(
    name: NodeArgument, reason: ReasonOption = "", cluster: ClusterOption = None, as_json: JsonOption = False
) -> None:
    """Jobs there save a checkpoint and go on elsewhere, and nothing new lands."""
    _change(name, NodeState.DRAINING, reason, cluster, as_json=as_json)


@node_app.command()
def exclude(
    name: NodeArgument, reason: ReasonOption = "", cluster: ClusterOption = None, as_json: JsonOption = False
) -> None:
    """Nothing new lands; jobs there go on."""
    _change(name, NodeState.EXCLUDED, reason, cluster, as_json=as_json)


@node_app.command()
def include(name: NodeArgument, cluster: ClusterOption = None, as_json: JsonOption = False) -> None:
    """The end of a drain, an exclusion or a quarantine."""
    _change(name, NodeState.READY, "", cluster, as_json=as_json)


def _change(name: str, state: NodeState, reason: str, cluster: str | None, *, as_json: bool) -> None:
    _print_nodes(Client().set_node_state(name, state, reason=reason, cluster=cluster), as_json=as_json)


def _print_nodes(nodes: Sequence[NodeView], *, as_json: bool) -> None:
    if as_json:
        print_json(models_to_json(nodes))
        return
    if not nodes:
        out.print("no nodes")
        return
    several = len({node.cluster for node in nodes}) > 1
    table = borderless_table()
    for title in (
        "node",
        *(["cluster"] if several else []),
        "state",
        "used",
        "of",
        "jobs",
        "address",
        "labels",
    ):
        table.add_column(title, overflow="fold", justify="right" if title in ("used", "of") else "left")
    for node in nodes:
        name = node.name if node.host in ("", node.name) else f"{node.name} ({node.host})"
        table.add_row(
            escape(name),
            *([escape(node.cluster)] if several else []),
            escape(state_text(node)),
            str(sum(kind.used for kind in node.accelerators)),
            escape(_total_text(node)),
            escape(jobs_text(node)),
            node.address,
            escape(
                ", ".join(f"{key}={value}" for key, value in node.labels.items() if key != "ray.io/node-id")
            ),
        )
    out.print(table)


def _total_text(node: NodeView) -> str:
    """The number of its accelerators, with their types."""
    types = dict.fromkeys(kind.accelerator_type for kind in node.accelerators if kind.accelerator_type)
    return " ".join([str(sum(kind.total for kind in node.accelerators)), *types])


def state_text(node: NodeView) -> str:
    """The state with who set it, why, and when it ends."""
    parts = [
        f"by {node.by}" if node.by else "",
        f"until {node.until.astimezone():%H:%M}" if node.until is not None else "",
        "" if node.id else "gone",
    ]
    named = ", ".join([node.state, *filter(None, parts)])
    return f"{named}: {node.reason}" if node.reason else named


def jobs_text(node: NodeView) -> str:
    """Names the first few jobs that have workers on a node, with their meshes, and counts the others."""
    more = f" and {len(node.jobs) - _JOBS_NAMED} more" if len(node.jobs) > _JOBS_NAMED else ""
    return ", ".join(f"{job.job_id} ({' '.join(job.meshes)})" for job in node.jobs[:_JOBS_NAMED]) + more
