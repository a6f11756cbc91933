"""Specs for the scheduler's tests."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

# the shared folder lies beside the checkout
SHARED = Path(__file__).resolve().parents[4] / "shared"


def chain(
    stages: int,
    microbatches: int,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    transfer: float = 1.0,
    contention: str = "full-duplex",
    skips: tuple[tuple[int, int], ...] = (),
    schedule: str = "eager-1f1b",
    meshes: list[int] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """A chain with extra edges; one stage a mesh unless `meshes` places them."""
    placed = list(range(stages)) if meshes is None else meshes
    edges = [(i, i + 1) for i in range(stages - 1)] + list(skips)
    return {
        "microbatches": microbatches,
        "meshes": [{"name": f"m{i}"} for i in range(max(placed) + 1)],
        "stages": [
            {
                "name": f"s{i}",
                "mesh": f"m{placed[i]}",
                "forward_s": forward,
                "backward_input_s": backward / 2,
                "backward_weight_s": backward / 2,
                "activation_bytes": 2,
                "weight_stash_bytes": 1,
            }
            for i in range(stages)
        ],
        "edges": [
            {"source": f"s{a}", "target": f"s{b}", "forward_s": transfer, "backward_s": transfer}
            for a, b in edges
        ],
        "network": {"contention": contention},
        "schedule": schedule,
        **fields,
    }


STAGE_COSTS = (
    *("forward_s", "backward_input_s", "backward_weight_s", "backward_s"),
    *("activation_bytes", "weight_stash_bytes", "rematerialised_bytes"),
)
EDGE_COSTS = ("forward_s", "backward_s", "forward_bytes", "backward_bytes", "held_bytes")


def in_buckets(
    data: dict[str, Any], bucket_of: list[int], cost: Callable[[int, str, float], float]
) -> dict[str, Any]:
    """The spec with length buckets: `cost` gives a field of a bucket from its index, the field's name and value.

    The stages and edges themselves get the most of any bucket.
    """
    count = max(bucket_of) + 1

    def costs_of(item: dict[str, Any], fields: tuple[str, ...]) -> list[dict[str, float]]:
        given = {field: item[field] for field in fields if item.get(field) is not None}
        buckets = [{field: cost(b, field, value) for field, value in given.items()} for b in range(count)]
        item.update({field: max(bucket[field] for bucket in buckets) for field in given})
        return buckets

    data = copy.deepcopy(data)
    stages = [costs_of(stage, STAGE_COSTS) for stage in data["stages"]]
    edges = [costs_of(edge, EDGE_COSTS) for edge in data["edges"]]
    buckets = [{"stages": [s[b] for s in stages], "edges": [e[b] for e in edges]} for b in range(count)]
    return {**data, "microbatches": len(bucket_of), "length_buckets": buckets, "bucket_of": bucket_of}


def scaled_buckets(data: dict[str, Any], bucket_of: list[int], scales: list[float]) -> dict[str, Any]:
    """The spec with buckets whose costs are those of the spec times a scale; bytes are rounded."""
    return in_buckets(
        data,
        bucket_of,
        lambda b, field, value: round(value * scales[b]) if field.endswith("bytes") else value * scales[b],
    )


def measured(
    meshes: int,
    microbatches: int,
    seed: int,
    *,
    loops: int = 1,
    skips: bool = True,
    memory: float | None = None,
    contention: str = "link",
    as_jobs: bool = False,
) -> dict[str, Any]:
    """Costs as measurements make them: log-normal stages, transfers in bytes over unequal links, skips.

    `memory` is how many microbatches' activations fit beside the static bytes of a mesh. `as_jobs` adds what a job's
    profile says besides: whole backwards are a tenth shorter than their parts, and every stage may recompute.
    """
    draw = random.Random(seed)
    around = lambda middle, spread: middle * draw.lognormvariate(0.0, spread)  # noqa: E731
    count = meshes * loops
    stages = [
        {
            "name": f"s{i}",
            "mesh": f"m{i % meshes}",
            "forward_s": around(0.01, 0.3),
            "backward_input_s": around(0.01, 0.3),
            "backward_weight_s": around(0.01, 0.3),
            "activation_bytes": int(around(1e8, 0.5)),
            "weight_stash_bytes": int(around(2e7, 0.3)),
            "static_bytes": int(around(1e9, 0.3)),
        }
        for i in range(count)
    ]
    for stage in stages if as_jobs else ():
        stage["backward_s"] = 0.9 * (stage["backward_input_s"] + stage["backward_weight_s"])
        stage["recompute"] = {
            "extra_s": stage["forward_s"],
            "activation_bytes": stage["activation_bytes"] // 10,
        }
    pairs = [(i, i + 1) for i in range(count - 1)]
    if skips:
        pairs += [(i, count - 1 - i) for i in range(0, count // 2 - 1, 3)]
    edges = [
        {"source": f"s{a}", "target": f"s{b}", "forward_bytes": size, "backward_bytes": size}
        for a, b in pairs
        for size in (int(around(4e6, 0.4)),)
    ]
    linked = sorted({(a % meshes, b % meshes) for a, b in pairs if a % meshes != b % meshes})
    links = [
        {
            "source": f"m{a}",
            "target": f"m{b}",
            "bandwidth_bytes_per_s": around(1e9, 0.5),
            "latency_s": around(2e-5, 0.3),
        }
        for pair in linked
        for a, b in (pair, pair[::-1])
    ]
    unique = {(link["source"], link["target"]): link for link in links}
    mesh_list: list[dict[str, Any]] = [{"name": f"m{p}"} for p in range(meshes)]
    if memory is not None:
        for mesh in mesh_list:
            here = [s for s in stages if s["mesh"] == mesh["name"]]
            held = sum(s["activation_bytes"] for s in here)
            mesh["memory_bytes"] = int(sum(s["static_bytes"] for s in here) + memory * held + 4e7)
    return {
        "microbatches": microbatches,
        "meshes": mesh_list,
        "stages": stages,
        "edges": edges,
        "network": {
            "contention": contention,
            "bandwidth_bytes_per_s": 1e9,
            "latency_s": 2e-5,
            "links": list(unique.values()),
        },
        "schedule": "auto",
    }


@st.composite
def _placements(draw: st.DrawFn, placement: str) -> list[int]:
    """The mesh of each stage."""
    if placement == "one":
        return draw(st.permutations(range(draw(st.integers(1, 6)))))
    if placement == "loop":
        meshes = draw(st.integers(2, 3))
        return [*range(meshes)] * draw(st.integers(2, 3))
    if placement == "v":
        meshes = draw(st.integers(1, 3))
        return [*range(meshes), *reversed(range(meshes))]
    stages = draw(st.integers(1, 6))
    meshes = draw(st.integers(1, stages))
    placed = [*range(meshes), *(draw(st.integers(0, meshes - 1)) for _ in range(stages - meshes))]
    return draw(st.permutations(placed))


@st.composite
def random_specs(draw: st.DrawFn, *, limits: bool = True, placement: str = "any") -> dict[str, Any]:
    """Random acyclic graphs, placements, costs, contention and limits; limits always admit one microbatch.

    `placement`: stages on "any" mesh, "one" on each, in rounds ("loop"), or there and back ("v").
    """
    placed = draw(_placements(placement))
    stages, meshes = len(placed), max(placed) + 1
    microbatches = draw(st.integers(1, 5))
    whole = draw(st.booleans())
    cost = (
        st.integers(0, 5)
        if whole
        else st.floats(0.0, 5.0, allow_nan=False, allow_subnormal=False).map(lambda x: round(x, 6))
    )
    pairs = [(i, j) for i in range(stages) for j in range(i + 1, stages)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=8, unique=True)) if pairs else []
    tensors = draw(st.booleans())
    by_source: dict[tuple[int, int], tuple] = {}
    listed = []
    for a, b in edges:
        costs = (draw(cost), draw(cost))
        tensor = None
        if tensors and draw(st.booleans()):
            tensor = "t"
            costs = by_source.setdefault((a, placed[b]), costs)
        listed.append(
            {
                "source": f"s{a}",
                "target": f"s{b}",
                "forward_s": costs[0],
                "backward_s": costs[1],
                "tensor": tensor,
            }
        )
    made = []
    for i in range(stages):
        held = draw(st.integers(0, 4))
        made.append(
            {
                "name": f"s{i}",
                "mesh": f"m{placed[i]}",
                "forward_s": draw(cost),
                "backward_input_s": draw(cost),
                "backward_weight_s": draw(cost),
                "activation_bytes": held,
                "weight_stash_bytes": draw(st.integers(0, held)),
            }
        )
    mesh_list = []
    for p in range(meshes):
        least = sum(s["activation_bytes"] for s in made if s["mesh"] == f"m{p}")
        mesh: dict[str, Any] = {"name": f"m{p}"}
        if limits and draw(st.booleans()):
            mesh["activation_limit_bytes"] = least + draw(st.integers(0, 6))
        if limits and draw(st.integers(0, 3)) == 0:
            mesh["receive_buffer_limit"] = draw(st.integers(8, 12))
        mesh_list.append(mesh)
    return {
        "microbatches": microbatches,
        "meshes": mesh_list,
        "stages": made,
        "edges": listed,
        "network": {"contention": draw(st.sampled_from(["none", "link", "full-duplex", "half-duplex"]))},
        "overlap": draw(st.booleans()),
        "split_backward": draw(st.sampled_from([None, True, False])),
        "max_in_flight": draw(st.sampled_from([None, None, 1, 2, 3])),
        "schedule": "auto",
    }


def by_every_method():
    """A chain of four stages, of which one keeps everything and three recompute, each by another method."""
    data = chain(4, 4, schedule="1f1b")
    flags = [{"required": True}, {"required": True, "selective": True}, {"required": True, "by_block": True}]
    for stage, flag in zip(data["stages"][1:], flags, strict=True):
        stage["activation_bytes"] = 3
        stage["recompute"] = {"activation_bytes": 1, "extra_s": 0.5, **flag}
    return data
