"""Public models as they are, trained by Slotline and by a plain loop: the losses and parameters beside each other.

`make bench-models`, or `python -m tests.benchmarks.models [--only NAME ...] [--resume] [--limit-s 240]`: every model of
the catalogue in a process of its own, in three layouts; the table as Markdown. Small configurations, random weights,
nothing downloaded. Finished rows are kept in build/bench-models: --resume leaves them as they are. What a model does to
its process, a crash or a standstill, is its row's own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.benchmarks.models.catalogue import ENTRIES
from tests.benchmarks.models.entry import Entry
from tests.benchmarks.models.row import LAYOUTS, MARK, STEPS, Result

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "build" / "bench-models"
EXTRA = Path(sys.prefix) / "models"
LIBRARIES = ("torch", "transformers", "diffusers", "timm", "torchvision", "peft")


def run(entry: Entry, limit_s: float) -> list[Result]:
    """The row of `entry`; a layout in which its process died or stood still says so, and the next begins anew."""
    found: list[Result] = []
    while left := list(LAYOUTS)[len(found) :]:
        found += _run(entry, left, limit_s)
    return found


def _run(entry: Entry, layouts: Sequence[str], limit_s: float) -> list[Result]:
    log = KEPT / f"{_slug(entry)}.log"
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "tests.benchmarks.models.row",
        entry.name,
        str(time.time() + limit_s),
        *layouts,
    ]
    paths = [str(ROOT), *([str(EXTRA)] if entry.needs_extra else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    with log.open("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            ended = (
                f"its process died of {signal.Signals(-code).name}"
                if code < 0
                else f"its process ended with {code}"
            )
        except subprocess.TimeoutExpired:
            ended = f"not done after {limit_s:.0f} s, see {_slug(entry)}-late.log"
            shutil.copy(log, log.with_name(f"{_slug(entry)}-late.log"))
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    found = [Result.from_json(json.loads(line.removeprefix(MARK))) for line in lines if line.startswith(MARK)]
    if len(found) < len(layouts):
        last = next((line for line in reversed(lines) if line.strip() and not line.startswith(MARK)), "")
        found.append(Result(layouts[len(found)], refused=f"{ended} ({last.strip()[:160]})"))
    return found


def table(rows: Sequence[tuple[Entry, Sequence[Result]]]) -> str:
    """In Markdown, then what was refused or differs, a line each."""
    lines = [
        "| model | library | raw or wrapped | "
        + " | ".join(LAYOUTS)
        + " | rounding | parameters | rounding | in double |",
        "|---|---|---|" + "---|" * (len(LAYOUTS) + 4),
    ]
    below = []
    for entry, results in rows:
        trained = [one for one in results if one.apart is not None]
        cells = ["refused" if one.apart is None else f"{one.apart.loss:.1e}" for one in results]
        for of in (
            lambda one: one.rounding.loss,
            lambda one: one.apart.moved,
            lambda one: one.rounding.moved,
            lambda one: one.double and max(one.double.loss, one.double.moved),
        ):
            most = max((value for one in trained if (value := of(one)) is not None), default=None)
            cells.append("" if most is None else f"{most:.1e}")
        lines.append(f"| {entry.name} | {entry.library} | {entry.wrapped or 'raw'} | {' | '.join(cells)} |")
        below += [f"* {entry.name}, {one.layout}: {_told(one)}" for one in results if not one.equal]
    equal = sum(all(one.equal for one in results) for _, results in rows)
    return "\n".join([*lines, "", f"{equal} of {len(rows)} models are equal in all layouts.", "", *below])


def _told(one: Result) -> str:
    if one.apart is None:
        return one.refused
    apart = one.double or one.apart
    said = f"loss {apart.loss:.1e}, {apart.worst} {apart.moved:.1e}, buffers {apart.buffers:.1e}"
    return said if one.equal else f"**differs**{' in double precision' if one.double else ''}: {said}"


def _slug(entry: Entry) -> str:
    return re.sub(r"\W+", "-", entry.name.lower()).strip("-")


def _versions() -> str:
    found = []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", metavar="NAME", help=f"of {', '.join(ENTRIES)}")
    parser.add_argument("--resume", action="store_true", help="leave rows that are there as they are")
    parser.add_argument("--limit-s", type=float, default=240.0, help="for a model, in all layouts")
    given = parser.parse_args()
    if unknown := sorted(set(given.only or ()) - set(ENTRIES)):
        parser.error(f"no model {unknown[0]!r}: there are {', '.join(ENTRIES)}")
    if not EXTRA.is_dir():
        parser.error(f"{EXTRA} is not there, with timm and torchvision: use make bench-models")
    sys.path.append(str(EXTRA))
    KEPT.mkdir(parents=True, exist_ok=True)
    rows = []
    for entry in ENTRIES.values():
        kept = KEPT / f"{_slug(entry)}.json"
        wanted = given.only is None or entry.name in given.only
        if wanted and not (given.resume and kept.exists()):
            began = time.monotonic()
            results = run(entry, given.limit_s)
            kept.write_text(json.dumps([asdict(one) for one in results]))
            print(
                f"{entry.name}: {'; '.join(map(_told, results))}, {time.monotonic() - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )
        elif not kept.exists():
            continue
        rows.append((entry, [Result.from_json(one) for one in json.loads(kept.read_text())]))
    print(f"{_versions()}; {STEPS} steps of 4 microbatches\n\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
