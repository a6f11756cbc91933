"""What a plan says of memory, and what is learned when it was too little.

Pure values, light: no torch. How memory is measured is worker/memory.py's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The factor on activations after an attempt ran out of memory: what was seen tells it, but the tensor that found
# no place is not in there, and a wrong measurement must not make all plans impossible.
LEAST_CORRECTION = 1.25
MOST_CORRECTION = 4.0


def static_bytes_by_mesh(spec: Mapping[str, Any]) -> dict[str, int]:
    """What the stages of every mesh always hold, by the JSON of a PipelineSpec."""
    total = {mesh["name"]: 0 for mesh in spec["meshes"]}
    for stage in spec["stages"]:
        total[stage["mesh"]] += stage.get("static_bytes", 0)
    return total


def planned_peak_bytes(spec: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, int]:
    """The most bytes that each mesh holds by its plan (JSON of a Plan).

    A plan without `peak_memory_bytes` counts static bytes and activations.
    """
    static = static_bytes_by_mesh(spec)
    peaks = {}
    for mesh in plan["meshes"]:
        whole = mesh.get("peak_memory_bytes")
        name = mesh["name"]
        peaks[name] = static.get(name, 0) + mesh["peak_activation_bytes"] if whole is None else whole
    return peaks


def correction(*, planned_bytes: int, static_bytes: int, seen_bytes: int) -> float:
    """The factor by which a mesh's activations were larger than planned, from 1.25 to 4.

    `seen_bytes` is the most that the mesh held and wanted when it ran out; 0 where nobody saw it.
    """
    activations = planned_bytes - static_bytes
    found = (seen_bytes - static_bytes) / activations if activations > 0 else LEAST_CORRECTION
    return min(max(found, LEAST_CORRECTION), MOST_CORRECTION)
