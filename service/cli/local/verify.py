"""`slotline verify`: proves on this machine that a job's pipeline computes what its plain model does.

Runs the parity check. Needs no server and no GPU: it measures and plans as `slotline plan --local` does, then runs
both in a subprocess and prints the proof. A subprocess that dies in native code is reported with the action that it
was in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from service.cli.job_file import read_spec
from service.cli.local.plan import local_job_costs, plan_from_costs, python_path, validated_job
from service.cli.output import BudgetOption, CliError, JsonOption, print_message
from worker.contract.tasks import PROOF_RESULT_MARK, EndedTask, run_task

app = typer.Typer()


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="The job, as YAML or JSON; - reads standard input.")],
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to compare.")] = 3,
    resume: Annotated[
        str | None,
        typer.Option(help="Go on from this checkpoint (a folder or URI), saved on any layout of the model."),
    ] = None,
    budget_s: BudgetOption = 3.0,
    limit_s: Annotated[
        float, typer.Option("--limit-s", min=1.0, help="Limit of the comparison in seconds.")
    ] = 3600.0,
    as_json: JsonOption = False,
) -> None:
    """Prove on this job's own model that its pipeline computes what plain training on one worker does.

    Initial weights, losses, every gradient, every parameter after each step, buffers, and every transfer. Exit code 0
    only where all are equal to rounding; else the first that differs is named, with the slot that made it.
    """
    try:
        proof = verify_job(
            read_spec(file), file, steps=steps, resume=resume, budget_s=budget_s, limit_s=limit_s
        )
    except (ValueError, OSError) as error:
        raise CliError(str(error)) from None
    for note in proof["notes"]:
        print_message(f"note: {note}")
    typer.echo(json.dumps(proof, indent=1) if as_json else proof_text(proof))
    if not proof["equal"]:
        raise typer.Exit(1)


def verify_job(
    spec: Mapping[str, Any],
    file: Path = Path("-"),
    *,
    steps: int = 3,
    resume: str | None = None,
    budget_s: float = 3.0,
    limit_s: float = 3600.0,
) -> dict[str, Any]:
    """Verify the job `spec` (as in job.yaml, which lies at `file`): the JSON of a Proof, with the plan's main figures.

    With `resume` both go on from that checkpoint.

    Raises ValueError where the job is wrong, cannot be measured or planned, or where it cannot be run at all.
    """
    place = None if resume is None else _checkpoint_place(resume)
    resources = spec.get("resources") or {}
    on_cpu = {**resources, "device": "cpu"} if isinstance(resources, Mapping) else resources
    checked, folder = validated_job({**spec, "resources": on_cpu}, file)
    planned = plan_from_costs(checked, local_job_costs(checked, folder), budget_s)
    request = {"job": checked, "planned": planned, "steps": steps, "resume": place}
    proof = _run_verification(request, folder, limit_s)
    pipeline = planned["spec"]
    return {
        **proof,
        "stages": len(pipeline["stages"]),
        "meshes": len(pipeline["meshes"]),
        "microbatches": pipeline["microbatches"],
        "schedule": planned["plan"]["chosen"],
    }


def _checkpoint_place(resume: str) -> str:
    """The URI of a checkpoint, absolute where it is a folder; ValueError where there is none, before anything is run."""
    if "://" in resume:
        return resume
    folder = Path(resume).expanduser().resolve()
    if not folder.is_dir():
        raise ValueError(
            f"--resume {resume!r} is no folder: name a checkpoint, as `slotline checkpoints ID` lists them"
        )
    return str(folder)


def proof_text(proof: Mapping[str, Any]) -> str:
    """The result, a table of the comparisons, and a list of what they do not cover."""
    result = (
        f"equal      {proof['steps']} steps to rounding"
        if proof["equal"]
        else f"DIFFERENT  {proof['difference']}"
    )
    lines = [
        result,
        f"ran        {proof['stages']} stages on {proof['meshes']} meshes, {proof['microbatches']} microbatches, "
        f"schedule {proof['schedule']}",
        "",
        f"{'what':28}{'compared':>10}{'worst':>12}{'allowed':>14}",
    ]
    for row in proof["compared"]:
        allowed = f"{row['allowed']:.1g}" if row["allowed"] else "bit for bit"
        lines.append(f"{row['what']:28}{row['count']:>10}{row['worst']:>12.2g}{allowed:>14}")
    return "\n".join([*lines, "", *(f"not covered: {text}" for text in proof["not_covered"])])


def _run_verification(request: Mapping[str, Any], folder: Path | None, limit_s: float) -> dict[str, Any]:
    try:
        ended = run_task(
            "verify",
            request,
            PROOF_RESULT_MARK,
            limit_s=limit_s,
            folder=folder,
            environment={**request["job"].get("env", {}), "PYTHONPATH": python_path(folder)},
        )
    except TimeoutError:
        raise ValueError(
            f"verifying took more than {limit_s:g} s and was ended: raise --limit-s, or take fewer --steps"
        ) from None
    answer = ended.result
    if answer is None:
        raise ValueError(_exit_text(ended))
    if "failed" in answer:
        raise ValueError(f"{answer['failed']}: {answer['message']}")
    return answer["proof"]


def _exit_text(ended: EndedTask) -> str:
    report = ended.crash
    where = f" in {report.action}" if report and report.action else ""
    if report is not None and report.signal is not None:
        print(report.stack, file=sys.stderr)
        return f"the process that verified died in native code ({report.signal}){where}"
    return f"the process that verified ended without a result (exit code {ended.exit_code}){where}"
