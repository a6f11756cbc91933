"""The scheduler: a library of pure functions, spec in, plan out. No I/O, no clock, no database, no Ray."""

from service.scheduler.plan import Plan, Slot
from service.scheduler.planner import make_plan
from service.scheduler.programs import PlanError
from service.scheduler.spec import MeshSpec, PipelineSpec, SpecError, load_spec

__all__ = ["MeshSpec", "PipelineSpec", "Plan", "PlanError", "Slot", "SpecError", "load_spec", "make_plan"]
