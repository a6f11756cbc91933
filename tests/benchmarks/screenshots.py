"""`python -m tests.benchmarks.screenshots FOLDER`: every page at 1440 and at 400 pixels, as pictures to be looked at.

The pages of the tests' seeded jobs in a headless Chromium; a page of 400 pixels that scrolls sideways fails the run.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from service.settings.settings import Settings
from tests.service.api.pages.conftest import headless_chromium, new_tab
from tests.service.api.pages.seed import PAGES, seed_states, seeded_site

WIDTHS = {1440: 900, 400: 800}
"""Of each width in pixels the window's height."""


def take_pictures(folder: Path) -> list[str]:
    """Write `NAME-WIDTH.png` of every page into `folder`; answers a line for each that is wider than its window."""
    folder.mkdir(parents=True, exist_ok=True)
    faults = []
    with tempfile.TemporaryDirectory(prefix="slotline-pictures-") as scratch:
        data, profile = Path(scratch) / "data", Path(scratch) / "chromium"
        data.mkdir()
        profile.mkdir()
        with seeded_site(data) as site, headless_chromium(profile) as chromium:
            seeding = seed_states(Settings(data_dir=data).sqlalchemy_url, Path(scratch) / "runs")
            starting, done = asyncio.run(seeding)
            jobs = {"running": site.running, "failed": site.failed, "starting": starting, "done": done}
            for name, (path, drawn) in PAGES.items():
                for width, height in WIDTHS.items():
                    with new_tab(chromium) as page:
                        page.open(f"{site.url}{path.format(**jobs)}", width=width, height=height)
                        page.wait(f"document.querySelector({drawn!r})")
                        page.screenshot(folder / f"{name}-{width}.png")
                        over = page.js(
                            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                        )
                        if over > 0:
                            faults.append(f"{name} is {over} pixels wider than a window of {width}")
    return faults


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("python -m tests.benchmarks.screenshots FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    faults = take_pictures(folder)
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{len(PAGES) * len(WIDTHS)} pictures in {folder}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
