"""Grafana dashboards as code: `python dashboards/build.py` writes their JSON beside this file.

It also copies them and rules.yml into the Helm chart, which can read no file outside its own folder.
Four read Prometheus (cluster, job, timeline, control_plane), steps.py reads PostgreSQL. They know the metrics' names
(DESIGN section 11), the tables and Grafana; nothing of how anything is measured.
"""

from __future__ import annotations

import json
from pathlib import Path

import cluster
import control_plane
import job
import steps
import timeline
from grafana_foundation_sdk.cog.encoder import JSONEncoder

HERE = Path(__file__).parent
CHART_FILES = HERE.parent / "deploy" / "chart" / "files"
BOARDS = (cluster, job, timeline, control_plane, steps)


def texts() -> dict[str, str]:
    """The JSON that Grafana imports, by file name."""
    boards = [module.build() for module in BOARDS]
    return {
        f"{board.uid}.json": json.dumps(board, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
        for board in boards
    }


if __name__ == "__main__":
    for name, text in texts().items():
        (HERE / name).write_text(text)
        (CHART_FILES / name).write_text(text)
    (CHART_FILES / "rules.yml").write_text((HERE / "rules.yml").read_text())
