"""`make bench-resume`: checkpoints of five layouts, each resumed on the four others, for the GPT and the U-Net.

How far the next step's loss and parameters are from those of the run that saved: 0 is bit for bit.
"""

from __future__ import annotations

import argparse
import tempfile

from tests.worker.actor.test_actor import job
from tests.worker.jobs.test_heterogeneous_meshes import unet
from tests.worker.layouts import LAYOUTS, STEPS, Difference, resumed, trained


def models() -> dict[str, dict]:
    untied = job()
    untied["model"] = {**untied["model"], "args": {**untied["model"]["args"], "tied": False}}
    return {"GPT": untied, "GPT, tied": job(), "U-Net": unet()}


def table(spec: dict, folder: str) -> list[str]:
    """Rows: where it was saved; columns: where it went on."""
    runs = {name: trained(spec, layout, f"{folder}/{name}") for name, layout in LAYOUTS.items()}
    found: dict[tuple[str, str], Difference] = {}
    for target, layout in LAYOUTS.items():
        others = {name: run for name, run in runs.items() if name != target}
        for source, difference in resumed(spec, layout, others).items():
            found[source, target] = difference
    lines = [f"| saved on | {' | '.join(LAYOUTS)} |", "|---" * (len(LAYOUTS) + 1) + "|"]
    for source in LAYOUTS:
        cells = [_cell(found.get((source, target))) for target in LAYOUTS]
        lines.append(f"| {source} | {' | '.join(cells)} |")
    moved = max(one.changed for one in found.values())
    return [*lines, "", f"The step moves a parameter by {moved:.2g} at most."]


def _cell(one: Difference | None) -> str:
    if one is None:
        return ""
    return "0, 0" if one.bitwise else f"{one.loss:.1e}, {one.parameters:.1e}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", choices=list(models()), action="append")
    chosen = arguments.parse_args().model or list(models())
    print(
        f"Step {STEPS + 1} after a checkpoint of step {STEPS}: greatest difference of the loss, of a parameter\n"
    )
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            print("\n".join([f"**{name}**", "", *table(models()[name], folder), ""]), flush=True)


if __name__ == "__main__":
    main()
