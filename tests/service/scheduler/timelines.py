"""The metrics of any list of slots, by the formulas that plans and measured timelines share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from service.scheduler.programs.plan import TimelineMetrics, combine_metrics, mesh_metrics

COMPUTE_ACTIONS = frozenset("FBIW")
TRANSFER_ACTIONS = frozenset(("SEND_F", "RECV_F", "SEND_B", "RECV_B"))


def timeline_metrics(slots: Iterable[Any], meshes: Iterable[str] | None = None) -> TimelineMetrics:
    """Metrics of slots (objects or JSON mappings with mesh, action, start_s, end_s).

    REDUCE and STEP are left out. `meshes` names the meshes to count; by default those that have slots.
    """
    rows: dict[str, tuple[list, list]] = {name: ([], []) for name in meshes or ()}
    for slot in slots:
        get = slot.get if isinstance(slot, Mapping) else lambda key, slot=slot: getattr(slot, key)
        action = get("action")
        if action in COMPUTE_ACTIONS or action in TRANSFER_ACTIONS:
            row = rows.setdefault(get("mesh"), ([], []))
            row[action in TRANSFER_ACTIONS].append((get("start_s"), get("end_s")))
    arrays = {
        name: tuple(np.array(part, dtype=float).reshape(-1, 2) for part in row) for name, row in rows.items()
    }
    everything = [part for row in arrays.values() for part in row if len(part)]
    makespan = (
        max(float(part[:, 1].max()) for part in everything)
        - min(float(part[:, 0].min()) for part in everything)
        if everything
        else 0.0
    )
    return combine_metrics(
        {name: mesh_metrics(compute, moves) for name, (compute, moves) in arrays.items()}, makespan
    )
