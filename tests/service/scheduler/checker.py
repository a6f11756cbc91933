"""A second, independent reading of DESIGN sections 4 and 6: checks plans and runs programs.

Works on the JSON forms only and shares no code with the scheduler.
"""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise
from typing import Any

RELATIVE = 1e-9


def close(a: float, b: float) -> bool:
    return abs(a - b) <= RELATIVE * max(abs(a), abs(b), 1e-300)


def not_before(a: float, b: float) -> bool:
    """a >= b within the tolerance."""
    return a >= b or close(a, b)


class Facts:
    """What a spec says, by name."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.M = spec["microbatches"]
        self.stages = {s["name"]: s for s in spec["stages"]}
        self.index = {s["name"]: i for i, s in enumerate(spec["stages"])}
        self.mesh = {s["name"]: s["mesh"] for s in spec["stages"]}
        self.groups: dict[tuple, list[int]] = {}
        for k, e in enumerate(spec["edges"]):
            if self.mesh[e["source"]] == self.mesh[e["target"]]:
                continue
            key = (k,) if e.get("tensor") is None else (e["source"], e["tensor"], self.mesh[e["target"]])
            self.groups.setdefault(key, []).append(k)
        self.transfer_of_edge = {k: edges[0] for edges in self.groups.values() for k in edges}
        self.members = {edges[0]: edges for edges in self.groups.values()}

    def bucket(self, microbatch: int) -> dict[str, Any] | None:
        if self.spec.get("bucket_of") is None:
            return None
        return self.spec["length_buckets"][self.spec["bucket_of"][microbatch]]

    def stage(self, name: str, microbatch: int) -> dict[str, Any]:
        """A stage with the costs of one microbatch."""
        bucket = self.bucket(microbatch)
        return self.stages[name] | (bucket["stages"][self.index[name]] if bucket else {})

    def edge(self, edge: int, microbatch: int) -> dict[str, Any]:
        """An edge with the costs of one microbatch."""
        bucket = self.bucket(microbatch)
        return self.spec["edges"][edge] | (bucket["edges"][edge] if bucket else {})

    def seconds(self, edge: int, direction: str, microbatch: int) -> float:
        e, network = self.edge(edge, microbatch), self.spec.get("network", {})
        if e.get(f"{direction}_s") is not None:
            return e[f"{direction}_s"]
        here, there = self.mesh[e["source"]], self.mesh[e["target"]]
        pair = (here, there) if direction == "forward" else (there, here)
        link = next((x for x in network.get("links", []) if (x["source"], x["target"]) == pair), {})
        latency = link.get("latency_s", network.get("latency_s", 0.0))
        bandwidth = link.get("bandwidth_bytes_per_s", network["bandwidth_bytes_per_s"])
        return latency + e[f"{direction}_bytes"] / bandwidth

    def length(self, action: str, stage: str, microbatch: int) -> float:
        s = self.stage(stage, microbatch)
        return {
            "F": s["forward_s"],
            "B": s["backward_input_s"] + s["backward_weight_s"]
            if s.get("backward_s") is None
            else s["backward_s"],
            "I": s["backward_input_s"],
            "W": s["backward_weight_s"],
        }[action]


def check_plan(spec: dict[str, Any], plan: dict[str, Any]) -> None:
    """Assert that the plan's slots are a feasible timeline of the spec and its numbers follow from them."""
    facts = Facts(spec)
    compute = {(s["action"], s["stage"], s["microbatch"]): s for s in plan["slots"] if s["lane"] == "compute"}
    moves = [s for s in plan["slots"] if s["lane"] != "compute"]
    assert len(compute) + len(moves) == len(plan["slots"]), "a compute slot stands there twice"
    inference = not any(a in ("B", "I") for a, _, _ in compute)
    back = {}
    for name in facts.stages:
        for m in range(facts.M):
            assert ("F", name, m) in compute
            if not inference:
                whole = ("B", name, m) in compute
                assert whole != (("I", name, m) in compute)
                assert whole != (("W", name, m) in compute)
                back[name, m] = "B" if whole else "I"
    assert len(compute) == sum(1 if inference else 2 if b == "B" else 3 for b in back.values()) or inference
    for (action, stage, m), slot in compute.items():
        assert slot["mesh"] == facts.mesh[stage]
        assert abs(slot["end_s"] - slot["start_s"] - facts.length(action, stage, m)) <= 1e-9 * max(
            1.0, slot["end_s"]
        )
    sent, received = _check_transfers(facts, moves, inference)
    _check_causes(facts, compute, back, sent, inference)
    _check_exclusive(facts, compute, moves)
    _check_memory(facts, compute, plan, inference)
    _check_all_memory(facts, compute, back, sent, plan, inference)
    _check_buffers(facts, compute, back, received)
    _check_numbers(facts, compute, moves, plan)


def _check_transfers(facts: Facts, moves: list[dict], inference: bool) -> tuple[dict, dict]:
    sent, received = {}, {}
    for s in moves:
        half = sent if s["action"].startswith("SEND") else received
        key = (s["edge"], s["action"][-1], s["microbatch"])
        assert key not in half, f"{key} twice"
        half[key] = s
        lane = ("send:" if half is sent else "recv:") + s["peer_mesh"]
        assert s["lane"] == lane
        edge = facts.spec["edges"][s["edge"]]
        maker, user = (edge["source"], edge["target"]) if key[1] == "F" else (edge["target"], edge["source"])
        here, there = (maker, user) if half is sent else (user, maker)
        assert (s["stage"], s["peer_stage"]) == (here, there)
        assert (s["mesh"], s["peer_mesh"]) == (facts.mesh[here], facts.mesh[there])
    directions = ["F"] if inference else ["F", "B"]
    wanted = {(first, d, m) for first in facts.members for d in directions for m in range(facts.M)}
    assert set(sent) == wanted == set(received)
    for key, s in sent.items():
        r = received[key]
        assert (s["start_s"], s["end_s"]) == (r["start_s"], r["end_s"])
        length = facts.seconds(key[0], "forward" if key[1] == "F" else "backward", key[2])
        assert abs(s["end_s"] - s["start_s"] - length) <= 1e-9 * max(1.0, s["end_s"])
    return sent, received


def _check_causes(facts: Facts, compute: dict, back: dict, sent: dict, inference: bool) -> None:
    for k, e in enumerate(facts.spec["edges"]):
        u, v = e["source"], e["target"]
        for m in range(facts.M):
            if k in facts.transfer_of_edge:
                first = facts.transfer_of_edge[k]
                move = sent[first, "F", m]
                assert not_before(move["start_s"], compute["F", u, m]["end_s"])
                assert not_before(compute["F", v, m]["start_s"], move["end_s"])
                if not inference:
                    move = sent[first, "B", m]
                    assert not_before(move["start_s"], compute[back[v, m], v, m]["end_s"])
                    assert not_before(compute[back[u, m], u, m]["start_s"], move["end_s"])
            else:
                assert not_before(compute["F", v, m]["start_s"], compute["F", u, m]["end_s"])
                if not inference:
                    assert not_before(
                        compute[back[u, m], u, m]["start_s"], compute[back[v, m], v, m]["end_s"]
                    )
    if inference:
        return
    for (stage, m), action in back.items():
        assert not_before(compute[action, stage, m]["start_s"], compute["F", stage, m]["end_s"])
        if action == "I":
            assert not_before(compute["W", stage, m]["start_s"], compute["I", stage, m]["end_s"])
    sinks = set(facts.stages) - {e["source"] for e in facts.spec["edges"]}
    for stage in sinks:
        starts = [compute["F", stage, m]["start_s"] for m in range(facts.M)]
        assert starts == sorted(starts) or facts.spec.get("bucket_of") is not None


def _check_exclusive(facts: Facts, compute: dict, moves: list[dict]) -> None:
    occupied = defaultdict(list)
    network = facts.spec.get("network", {})
    own = {(x["source"], x["target"]): x.get("contention") for x in network.get("links", [])}
    for s in compute.values():
        occupied["lane", s["mesh"]].append(s)
    for s in moves:
        if not s["action"].startswith("SEND"):
            continue
        a, b = s["mesh"], s["peer_mesh"]
        keys = {
            "none": [],
            "link": [("link", a, b)],
            "full-duplex": [("out", a), ("in", b)],
            "half-duplex": [("port", a), ("port", b)],
        }[own.get((a, b)) or network.get("contention", "none")]
        if not facts.spec.get("overlap", True):
            keys = [*keys, ("lane", a), ("lane", b)]
        for key in keys:
            occupied[key].append(s)
    for key, slots in occupied.items():
        slots = sorted(
            (s for s in slots if s["end_s"] > s["start_s"]), key=lambda s: (s["start_s"], s["end_s"])
        )
        for before, after in pairwise(slots):
            assert not_before(after["start_s"], before["end_s"]), (key, before, after)


def _check_all_memory(
    facts: Facts, compute: dict, back: dict, sent: dict, plan: dict, inference: bool
) -> None:
    """At every start of anything: static bytes, activations, stashes, and tensors on their way."""
    spans = defaultdict(list)  # mesh -> (begin, end, bytes)
    for (action, stage, m), s in compute.items():
        data = facts.stage(stage, m)
        held, stash = data.get("activation_bytes", 0), data.get("weight_stash_bytes", 0)
        if action == "F":
            until = s["end_s"] if inference else compute[back[stage, m], stage, m]["end_s"]
            spans[s["mesh"]].append((s["start_s"], until, held))
        if action in ("B", "I"):
            spans[s["mesh"]].append((s["start_s"], s["end_s"], data.get("rematerialised_bytes", 0)))
        if action == "W":
            spans[s["mesh"]].append((compute["I", stage, m]["end_s"], s["end_s"], stash))
    for (edge, direction, m), s in sent.items():
        way = "forward" if direction == "F" else "backward"
        of_edge = facts.edge(edge, m)
        size = of_edge.get(f"{way}_bytes") or 0
        if not size and (way == "forward" or of_edge.get("backward_s")):
            size = of_edge.get("held_bytes") or 0
        source = facts.spec["edges"][edge]["source"]
        targets = [facts.spec["edges"][k]["target"] for k in facts.members[edge]]
        if direction == "F":
            made = compute["F", source, m]["end_s"]
            used = max(compute["F", t, m]["end_s"] for t in targets)
        else:
            made = min(compute[back[t, m], t, m]["end_s"] for t in targets)
            used = compute[back[source, m], source, m]["end_s"]
        spans[s["mesh"]].append((made, s["end_s"], size))
        spans[s["peer_mesh"]].append((s["start_s"], used, size))
    for given, mesh in zip(facts.spec["meshes"], plan["meshes"], strict=True):
        static = sum(s.get("static_bytes", 0) for s in facts.spec["stages"] if s["mesh"] == given["name"])
        here = [span for span in spans[given["name"]] if span[2] and not not_before(span[0], span[1])]
        peak = max(
            (
                sum(size for begin, end, size in here if not_before(t, begin) and not not_before(t, end))
                for t, _, _ in here
            ),
            default=0,
        )
        assert static + peak == mesh["peak_memory_bytes"], given["name"]
        if given.get("memory_bytes") is not None:
            assert mesh["peak_memory_bytes"] <= given["memory_bytes"]


def _check_memory(facts: Facts, compute: dict, plan: dict, inference: bool) -> None:
    for given, mesh in zip(facts.spec["meshes"], plan["meshes"], strict=True):
        assert given["name"] == mesh["name"]
        level = peak = 0
        # one lane: slot after slot, each listed in order, so that actions of no length count too
        for s in compute.values():
            if s["mesh"] != given["name"]:
                continue
            data = facts.stage(s["stage"], s["microbatch"])
            held = data.get("activation_bytes", 0)
            stash = data.get("weight_stash_bytes", 0)
            again = 0 if inference else data.get("rematerialised_bytes", 0)
            level += {"F": held, "B": again, "I": again, "W": 0}[s["action"]]
            peak = max(peak, level)
            whole = held + again
            level -= {"F": held if inference else 0, "B": whole, "I": whole - stash, "W": stash}[s["action"]]
        assert level == 0
        assert peak == mesh["peak_activation_bytes"], given["name"]
        if given.get("activation_limit_bytes") is not None:
            assert peak <= given["activation_limit_bytes"]


def _peak(events: list[tuple[float, int, int]]) -> int:
    """Largest sum; times within the tolerance are one instant, at which ends come first."""
    events.sort()
    level = peak = at = 0
    while at < len(events):
        until = at
        while until < len(events) and close(events[until][0], events[at][0]):
            until += 1
        instant = sorted(events[at:until], key=lambda e: e[1])
        for _, _, change in instant:
            level += change
            peak = max(peak, level)
        at = until
    return peak


def _check_buffers(facts: Facts, compute: dict, back: dict, received: dict) -> None:
    for given in facts.spec["meshes"]:
        limit = given.get("receive_buffer_limit")
        if limit is None:
            continue
        events = []
        for (first, direction, m), s in received.items():
            if s["mesh"] != given["name"]:
                continue
            edges = [facts.spec["edges"][k] for k in facts.members[first]]
            if direction == "F":
                free = max(compute["F", e["target"], m]["end_s"] for e in edges)
            else:
                u = edges[0]["source"]
                free = compute[back[u, m], u, m]["end_s"]
            events += [(s["start_s"], 1, 1), (free, 0, -1)]
        assert _peak(events) <= limit, given["name"]


def _check_numbers(facts: Facts, compute: dict, moves: list[dict], plan: dict) -> None:
    slots = [*compute.values(), *moves]
    assert close(plan["makespan_s"], max(s["end_s"] for s in slots) - min(s["start_s"] for s in slots)) or (
        plan["makespan_s"] == 0
    )
    spans, busy = [], 0.0
    for mesh in plan["meshes"]:
        here = [s for s in compute.values() if s["mesh"] == mesh["name"]]
        first, last = min(s["start_s"] for s in here), max(s["end_s"] for s in here)
        spans.append(last - first)
        total = sum(s["end_s"] - s["start_s"] for s in here)
        busy += total
        assert abs(total - mesh["compute_s"]) <= 1e-9 * max(1.0, plan["makespan_s"])
        mine = [s for s in moves if s["mesh"] == mesh["name"]]
        points = sorted({t for s in [*here, *mine] for t in (s["start_s"], s["end_s"])} | {first, last})
        exposed = 0.0
        for a, b in pairwise(points):
            middle = (a + b) / 2
            inside = first < middle < last
            computing = any(s["start_s"] < middle < s["end_s"] for s in here)
            if inside and not computing and any(s["start_s"] < middle < s["end_s"] for s in mine):
                exposed += b - a
        assert abs(exposed - mesh["exposed_transfer_s"]) <= 1e-7 * max(1.0, plan["makespan_s"])
    assert close(max(spans), plan["span_s"]) or max(spans) == plan["span_s"]
    assert plan["lower_bound_s"] <= plan["makespan_s"] * (1 + RELATIVE)
    if plan["makespan_s"] > 0:
        assert abs(plan["bubble_ratio"] - (1 - busy / (len(plan["meshes"]) * plan["makespan_s"]))) < 1e-9


def run_programs(spec: dict[str, Any], programs: dict[str, list[dict]], seed: int) -> None:
    """Run the programs with random durations, as workers would: lanes in order, events, rendezvous by order.

    Asserts that nothing blocks, that every message is what its receiver expects, and that every
    action finds its inputs.
    """
    facts = Facts(spec)
    rng = random.Random(seed)
    lanes: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for mesh, program in programs.items():
        recorded = set()
        for ins in program:
            assert set(ins["wait"]) <= recorded, "waits for an event that is recorded later"
            if ins["record"] is not None:
                recorded.add(ins["record"])
            lanes[mesh, ins["lane"]].append(ins)
    position = dict.fromkeys(lanes, 0)
    events: dict[str, set[int]] = {mesh: set() for mesh in programs}
    have: dict[str, set[tuple]] = {mesh: set() for mesh in programs}
    running: list[tuple[float, list[tuple[str, str]]]] = []
    busy: set[tuple[str, str]] = set()
    time, left = 0.0, sum(len(p) for p in programs.values())

    def ready(lane: tuple[str, str]) -> dict | None:
        if lane in busy or position[lane] == len(lanes[lane]):
            return None
        ins = lanes[lane][position[lane]]
        return ins if set(ins["wait"]) <= events[lane[0]] else None

    while left:
        keys = list(lanes)
        rng.shuffle(keys)
        for lane in keys:
            ins = ready(lane)
            if ins is None or ins["op"].startswith("RECV"):
                continue
            if ins["op"].startswith("SEND"):
                other = (ins["peer"], f"recv:{lane[0]}")
                match = ready(other)
                if match is None:
                    continue
                assert (match["op"][-1], match["microbatch"], match["edge"]) == (
                    ins["op"][-1],
                    ins["microbatch"],
                    ins["edge"],
                ), f"message mismatch: {ins} against {match}"
                _needs_output(facts, ins, have[lane[0]])
                running.append((time + rng.random(), [lane, other]))
                busy |= {lane, other}
            else:
                _needs_inputs(facts, ins, have[lane[0]], inference=_is_inference(programs))
                running.append((time + rng.random(), [lane]))
                busy.add(lane)
        assert running, "deadlock"
        running.sort(key=lambda item: item[0])
        time, ended = running.pop(0)
        for lane in ended:
            ins = lanes[lane][position[lane]]
            position[lane] += 1
            busy.discard(lane)
            left -= 1
            have[lane[0]].add((ins["op"], ins["stage"], ins["microbatch"], ins["edge"]))
            if ins["record"] is not None:
                events[lane[0]].add(ins["record"])


def _is_inference(programs: dict[str, list[dict]]) -> bool:
    return not any(ins["op"] in ("B", "I") for program in programs.values() for ins in program)


def _needs_output(facts: Facts, ins: dict, have: set[tuple]) -> None:
    m, edges = ins["microbatch"], facts.members[ins["edge"]]
    if ins["op"] == "SEND_F":
        source = facts.index[facts.spec["edges"][edges[0]]["source"]]
        assert ("F", source, m, None) in have
        return
    for edge in edges:
        user = facts.index[facts.spec["edges"][edge]["target"]]
        assert ("B", user, m, None) in have or ("I", user, m, None) in have


def _needs_inputs(facts: Facts, ins: dict, have: set[tuple], *, inference: bool) -> None:
    op, stage, m = ins["op"], ins["stage"], ins["microbatch"]
    if op in ("REDUCE", "STEP"):
        return
    if op == "W":
        assert ("I", stage, m, None) in have
        return
    for k, e in enumerate(facts.spec["edges"]):
        first = facts.transfer_of_edge.get(k)
        u, v = facts.index[e["source"]], facts.index[e["target"]]
        if op == "F" and v == stage:
            if first is None:
                assert ("F", u, m, None) in have
            else:
                assert any(h[0] == "RECV_F" and h[2:] == (m, first) for h in have), ins
        if op in ("B", "I") and u == stage:
            if first is None:
                assert ("B", v, m, None) in have or ("I", v, m, None) in have
            else:
                assert any(h[0] == "RECV_B" and h[2:] == (m, first) for h in have), ins
    if op in ("B", "I"):
        assert ("F", stage, m, None) in have
