"""`slotline plans`: those that are kept under names, for `slotline submit --plan`."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from service.cli.job_plan import job_plan_text
from service.cli.output import Json, Offers, checked, offering, out, print_json, to_json
from service.client import Client
from service.jobspec import NAME_PATTERN


def _own_plans(client: Client) -> Offers:
    whose = client.whoami().name
    plans = client.named_plans(owner=whose or None)
    return [(one.name, f"of {one.job_name}") for one in plans if one.owner == whose]


_a_name = checked(NAME_PATTERN, "a plan's name")
_own_plan = offering(_own_plans)
PlanName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        callback=_a_name,
        help="A kept plan's name",
        autocompletion=_own_plan,
    ),
]
GivenPlan = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="NAME",
        callback=_a_name,
        help="Train with exactly this plan, which `slotline plan job.yaml --name NAME` has kept",
        autocompletion=_own_plan,
    ),
]
KeptName = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        callback=_a_name,
        help="Keep the plan of a job on the server, for `slotline submit --plan NAME`",
    ),
]
Owner = Annotated[str | None, typer.Option(help="Whose plan; one's own if absent")]
app = typer.Typer(help="Plans that are kept under names, for `slotline submit --plan`.", no_args_is_help=True)


@app.command("list")
def list_plans(
    owner: Annotated[str | None, typer.Option(help="Only this principal's plans")] = None,
    as_json: Json = False,
) -> None:
    """Kept plans: what each was made for, and until when it stays."""
    found = list(Client().named_plans(owner=owner))
    if as_json:
        print_json(to_json(found))
        return
    table = Table()
    for title in ("name", "owner", "job", "meshes", "stages", "microbatches", "schedule", "step", "until"):
        table.add_column(title)
    for one in found:
        table.add_row(
            one.name,
            escape(one.owner),
            one.job_name,
            "+".join(map(str, one.workers)),
            str(len(one.begins)),
            str(one.microbatches),
            one.schedule,
            f"{one.step_s:.4g} s",
            "for ever" if one.expires_at is None else one.expires_at.date().isoformat(),
        )
    out.print(table if found else "no plans are kept")


@app.command()
def show(name: PlanName, owner: Owner = None, as_json: Json = False) -> None:
    """A kept plan: cut, memory, expected step; --json is all of it, with the job that it was made for."""
    found = Client().named_plan(name, owner=owner)
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    print(job_plan_text(found.plan), end="")


@app.command()
def remove(name: PlanName, owner: Owner = None, as_json: Json = False) -> None:
    """Forget a kept plan; jobs that were submitted with it keep it."""
    Client().remove_plan(name, owner=owner)
    print(json.dumps({"removed": name}) if as_json else f"removed {name}")
