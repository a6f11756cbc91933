"""The scheduler: a library of pure functions, spec in, plan out. No I/O, no clock, no database, no Ray.

The planner and its compiled kernels are imported on first use: who only reads specs need not wait a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from service.scheduler.model.spec import MeshSpec, PipelineSpec, SpecError, load_spec

if TYPE_CHECKING:
    from service.scheduler.plan import Plan, Slot
    from service.scheduler.planner import make_plan
    from service.scheduler.programs.decode import PlanError

_HOMES = {"Plan": "plan", "PlanError": "programs.decode", "Slot": "plan", "make_plan": "planner"}

__all__ = ["MeshSpec", "PipelineSpec", "Plan", "PlanError", "Slot", "SpecError", "load_spec", "make_plan"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
