"""Runs one task, `python -m worker.tasks check|drain|export|profile|release|remove|scale|verify`; exits with its status."""

from __future__ import annotations

import importlib
import sys

TASKS = {
    "check": "check",
    "drain": "drain",
    "profile": "profile",
    "export": "export_weights",
    "release": "release",
    "remove": "remove",
    "scale": "scale",
    "verify": "verify",
}
"""The module of each task."""


def main() -> int:
    """Import only the module of the task that is asked for: removing checkpoints needs no torch."""
    if len(sys.argv) != 2 or sys.argv[1] not in TASKS:
        print(f"usage: python -m worker.tasks {'|'.join(TASKS)}, not {sys.argv[1:]}", file=sys.stderr)
        return 2
    return importlib.import_module(f"worker.tasks.{TASKS[sys.argv[1]]}").main()


if __name__ == "__main__":
    sys.exit(main())
