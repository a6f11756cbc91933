"""The optimum of small planning problems, from the JSON spec alone: a CP-SAT model that shares no code with the
scheduler and assumes nothing about the order of microbatches, but for the forwards of sinks where microbatches are
alike.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from ortools.sat.python import cp_model


def optimum(
    spec: dict[str, Any], *, orders: dict[str, list[str]] | None = None, limit_s: float = 20.0
) -> int | None:
    """The least makespan of a spec with whole costs; None where it was not proven in time.

    `orders` (torch's actions of each mesh) fix the compute orders, so that only transfers are free.
    """
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = limit_s
    model = _model(spec, orders or {})
    status = solver.solve(model)
    return round(solver.objective_value) if status == cp_model.OPTIMAL else None


def _model(spec: dict[str, Any], orders: dict[str, list[str]]) -> cp_model.CpModel:
    model = cp_model.CpModel()
    stages, microbatches = spec["stages"], range(spec["microbatches"])

    def of(m: int) -> dict[str, Any]:
        """The costs of a microbatch: stages and edges."""
        if spec.get("bucket_of") is None:
            return {"stages": stages, "edges": spec["edges"]}
        return spec["length_buckets"][spec["bucket_of"][m]]

    split, overlap = bool(spec.get("split_backward")), spec.get("overlap", True)
    contention = spec["network"]["contention"]
    mesh_of = {s["name"]: s["mesh"] for s in stages}
    groups: dict[tuple, list[int]] = {}
    for index, edge in enumerate(spec["edges"]):
        here, there = mesh_of[edge["source"]], mesh_of[edge["target"]]
        if here != there:
            key = (index,) if edge.get("tensor") is None else (edge["source"], edge["tensor"], there)
            groups.setdefault(key, []).append(index)
    costs = [s["forward_s"] + s["backward_input_s"] + s["backward_weight_s"] for s in stages]
    costs += [sum(_edge_costs(spec, e)) for e in spec["edges"]]
    horizon = int(sum(costs)) * spec["microbatches"]
    makespan = model.new_int_var(0, horizon, "makespan")
    exclusive: dict[Any, list[cp_model.IntervalVar]] = {}
    start: dict[tuple, cp_model.IntVar] = {}
    end: dict[tuple, Any] = {}

    def add(key: tuple, length: float, *resources: Any) -> None:
        start[key] = model.new_int_var(0, horizon, str(key))
        end[key] = start[key] + int(length)
        interval = model.new_fixed_size_interval_var(start[key], int(length), str(key))
        for resource in set(resources):
            exclusive.setdefault(resource, []).append(interval)
        model.add(makespan >= end[key])

    def occupied(sender: str, receiver: str) -> list[Any]:
        if not overlap:
            return [("lane", sender), ("lane", receiver)]
        return {
            "none": [],
            "link": [("link", sender, receiver)],
            "full-duplex": [("out", sender), ("in", receiver)],
            "half-duplex": [("port", sender), ("port", receiver)],
        }[contention]

    for number, stage in enumerate(stages):
        name, lane = stage["name"], ("lane", stage["mesh"])
        for m in microbatches:
            s = of(m)["stages"][number]
            add(("F", name, m), s["forward_s"], lane)
            if split:
                add(("B", name, m), s["backward_input_s"], lane)
                add(("W", name, m), s["backward_weight_s"], lane)
                model.add(start["W", name, m] >= end["B", name, m])
            else:
                add(("B", name, m), s["backward_input_s"] + s["backward_weight_s"], lane)
            model.add(start["B", name, m] >= end["F", name, m])
    transfer_of = {}
    for key, edges in groups.items():
        edge = spec["edges"][edges[0]]
        here, there = mesh_of[edge["source"]], mesh_of[edge["target"]]
        for m in microbatches:
            forward_s, backward_s = _edge_costs(spec, of(m)["edges"][edges[0]])
            add(("X", key, m), forward_s, *occupied(here, there))
            add(("Y", key, m), backward_s, *occupied(there, here))
        transfer_of |= dict.fromkeys(edges, key)
    for index, edge in enumerate(spec["edges"]):
        for m in microbatches:
            source, target = ("F", edge["source"], m), ("F", edge["target"], m)
            back, after = ("B", edge["target"], m), ("B", edge["source"], m)
            if index in transfer_of:
                there, home = ("X", transfer_of[index], m), ("Y", transfer_of[index], m)
                model.add(start[there] >= end[source])
                model.add(start[target] >= end[there])
                model.add(start[home] >= end[back])
                model.add(start[after] >= end[home])
            else:
                model.add(start[target] >= end[source])
                model.add(start[after] >= end[back])
    for intervals in exclusive.values():
        model.add_no_overlap(intervals)
    for actions in orders.values():
        keys = []
        for action in actions:
            stage, op, m = re.fullmatch(r"(\d+)([FBIW])(\d+)", action).groups()
            keys.append(("B" if op == "I" else op, stages[int(stage)]["name"], int(m)))
        for before, after in pairwise(keys):
            model.add(start[after] >= end[before])
    sources_of = {e["target"] for e in spec["edges"]}
    feeding = {e["source"] for e in spec["edges"]}
    cap = spec.get("max_in_flight")
    for s in stages:
        name = s["name"]
        for m in list(microbatches)[1:]:
            if name not in feeding and spec.get("bucket_of") is None:
                model.add(start["F", name, m] >= end["F", name, m - 1])
        if cap is not None and name not in sources_of and spec.get("bucket_of") is not None:
            last = "W" if split else "B"
            travelling = [
                _span(model, horizon, start["F", name, m], end[last, name, m]) for m in microbatches
            ]
            model.add_cumulative(travelling, [1] * len(travelling), cap)
        elif cap is not None and name not in sources_of:
            for m in list(microbatches)[cap:]:
                model.add(start["F", name, m] >= end["W" if split else "B", name, m - cap])

    def hold(begin: Any, until: Any) -> cp_model.IntervalVar:
        return _span(model, horizon, begin, until)

    for mesh in spec["meshes"]:
        limit, memory = mesh.get("activation_limit_bytes"), mesh.get("memory_bytes")
        held, demands = [], []
        for number, name in ((n, s["name"]) for n, s in enumerate(stages) if s["mesh"] == mesh["name"]):
            for m in microbatches:
                s = of(m)["stages"][number]
                parts = [(s["activation_bytes"], start["F", name, m], end["B", name, m])]
                again = s.get("rematerialised_bytes", 0)
                parts.append((again, start["B", name, m], end["B", name, m]))
                if split:
                    parts.append((s["weight_stash_bytes"], end["B", name, m], end["W", name, m]))
                for size, begin, until in parts:
                    held.append(hold(begin, until))
                    demands.append(size)
        if limit is not None:
            model.add_cumulative(held, demands, limit)
        if memory is None:
            continue
        for key, edges in groups.items():
            edge = spec["edges"][edges[0]]
            here, there = mesh_of[edge["source"]], mesh_of[edge["target"]]
            targets = [spec["edges"][k]["target"] for k in edges]
            for m in microbatches if edge.get("forward_bytes") is not None else ():
                edge = of(m)["edges"][edges[0]] | {"source": spec["edges"][edges[0]]["source"]}
                if mesh["name"] == there:
                    held += [
                        hold(start["X", key, m], _last(model, horizon, [end["F", t, m] for t in targets]))
                    ]
                    held += [
                        hold(_first(model, horizon, [end["B", t, m] for t in targets]), end["Y", key, m])
                    ]
                    demands += [edge["forward_bytes"], edge["backward_bytes"]]
                if mesh["name"] == here:
                    held += [hold(end["F", edge["source"], m], end["X", key, m])]
                    held += [hold(start["Y", key, m], end["B", edge["source"], m])]
                    demands += [edge["forward_bytes"], edge["backward_bytes"]]
        static = sum(s.get("static_bytes", 0) for s in stages if s["mesh"] == mesh["name"])
        model.add_cumulative(held, demands, memory - static)
    model.minimize(makespan)
    return model


def _span(model: cp_model.CpModel, horizon: int, begin: Any, until: Any) -> cp_model.IntervalVar:
    return model.new_interval_var(begin, model.new_int_var(0, horizon, ""), until, "")


def _edge_costs(spec: dict[str, Any], edge: dict[str, Any]) -> tuple[int, int]:
    """Seconds both ways; bytes travel at one byte a second."""
    if edge.get("forward_bytes") is None:
        return edge["forward_s"], edge["backward_s"]
    assert spec["network"]["bandwidth_bytes_per_s"] == 1
    return edge["forward_bytes"], edge["backward_bytes"]


def _last(model: cp_model.CpModel, horizon: int, ends: list[Any]) -> cp_model.IntVar:
    last = model.new_int_var(0, horizon, "")
    model.add_max_equality(last, ends)
    return last


def _first(model: cp_model.CpModel, horizon: int, ends: list[Any]) -> cp_model.IntVar:
    first = model.new_int_var(0, horizon, "")
    model.add_min_equality(first, ends)
    return first
