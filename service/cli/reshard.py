"""`slotline reshard`: plans the messages that move a tensor between two mesh layouts.

Needs no server. Imports the scheduler inside functions only: it takes a second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from service.cli.job_file import read_spec
from service.cli.output import CliError, JsonOption, OutputFileOption

FORMATS = ("text", "json", "svg")

app = typer.Typer()


@app.command()
def reshard(
    spec: Annotated[
        Path,
        typer.Argument(help="tensor, source, target and links, as JSON or YAML; - reads standard input."),
    ],
    output: OutputFileOption = None,
    format: Annotated[
        str | None,
        typer.Option(help="text, json or svg (default: text, or svg with -o FILE.svg, else json)."),
    ] = None,
    as_json: JsonOption = False,
    messages: Annotated[
        int, typer.Option(min=1, help="Cut tiles no finer than into so many messages in all.")
    ] = 1024,
) -> None:
    """Plan how a tensor goes from one mesh's layout to another's: who sends which tile to whom, and when.

    Prints the plan's makespan, a lower bound that no plan can beat, what naive transfers take, and a picture.
    """
    form = _output_format(format, as_json, output)
    data = read_spec(spec, "holds no resharding: give tensor, source and target as the README shows")
    try:
        text = _plan_text(data, form, messages)
        if output is not None:
            output.write_text(text)
    except OSError as error:
        raise CliError(f"cannot write {output}: {error.strerror}") from None
    except ValueError as error:
        raise CliError(str(error)) from None
    if output is None:
        typer.echo(text, nl=False)


def _output_format(format: str | None, as_json: bool, output: Path | None) -> str:
    if as_json and format not in (None, "json"):
        raise CliError(f"--json and --format {format} contradict each other: give one of them")
    form = "json" if as_json else format
    if form is None and output is not None:
        return "svg" if output.suffix == ".svg" else "json"
    if form not in (None, *FORMATS):
        raise CliError(f"format {form!r} does not exist: use one of {', '.join(FORMATS)}")
    return form or "text"


def _plan_text(data: dict, form: str, messages: int) -> str:
    # the scheduler takes a second to import: only this command pays for it
    from service.scheduler.resharding.resharding import (
        plan_gather_then_send,
        plan_resharding,
        plan_send_and_receive,
    )
    from service.scheduler.resharding.resharding_spec import load_resharding
    from service.scheduler.views.resharding_views import resharding_summary, resharding_svg

    given = load_resharding(data)
    values = (given.tensor, given.source, given.target, given.links)
    plan = plan_resharding(*values, messages=messages)
    if form == "svg":
        return resharding_svg(plan)
    if form == "json":
        return json.dumps(plan.to_json(), indent=1) + "\n"
    return resharding_summary(plan, [plan_send_and_receive(*values), plan_gather_then_send(*values)])
