"""Resharding: a tensor in one layout on one mesh, to another layout on another (DESIGN section 12). Pure.

`plan_resharding` is the door; `plan.py` says what comes out, `bound.py` what it is measured against.
"""

from service.scheduler.resharding.layout import Layout, Links, Tensor, layout
from service.scheduler.resharding.naive import plan_gather_then_send, plan_send_and_receive
from service.scheduler.resharding.plan import PlannedMessage, ReshardingPlan
from service.scheduler.resharding.planner import plan_resharding

__all__ = [
    "Layout",
    "Links",
    "PlannedMessage",
    "ReshardingPlan",
    "Tensor",
    "layout",
    "plan_gather_then_send",
    "plan_resharding",
    "plan_send_and_receive",
]
