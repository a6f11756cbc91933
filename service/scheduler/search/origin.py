"""Seeds of the searches and versions of the libraries, which a plan records so that it can be reproduced."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version

import numba
import numpy as np

RULES_SEED = 20261120  # of the generator that varies the rules
SOLVER_SEED = 1  # of the exact solver
FIRST_RUN_SEED = 1  # of tabu search and of the choice of parts; each run takes the next one

SEEDS = {"rules": RULES_SEED, "solver": SOLVER_SEED, "first_run": FIRST_RUN_SEED}


@cache
def versions() -> dict[str, str]:
    """Versions by name; with the same ones, the same spec and budget give the same plan."""
    return {
        "slotline": version("slotline"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "ortools": version("ortools"),
    }
