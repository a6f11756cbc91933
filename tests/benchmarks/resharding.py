"""Resharding over rate-limited links: planned beside measured, beside naive send and receive, beside gather-then-send; and
between meshes that share matrices alike, as a job plans it, beside pairs of workers.

`python -m tests.benchmarks.resharding` (Linux, as root). A network namespace is a host with one rate-limited card; its
workers are processes over gloo, and copies inside it go over its loopback. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from service.scheduler.job.heterogeneous import MeshGroups, reshard_tensor
from service.scheduler.problem.spec import NetworkSpec
from service.scheduler.resharding.layout import Layout, Links, Tensor, mesh_layout
from service.scheduler.resharding.resharding import (
    plan_gather_then_send,
    plan_resharding,
    plan_send_and_receive,
)
from service.scheduler.resharding.resharding_plan import PlannedResharding
from tests.benchmarks.overlap_net import Network, network, why_not

Planner = Callable[[Tensor, Layout, Layout, Links], PlannedResharding]

PLANNERS: Mapping[str, Planner] = {
    "planned": plan_resharding,
    "send and receive": plan_send_and_receive,
    "gather, then send": plan_gather_then_send,
}


def _as_a_job(tensor: Tensor, source: Layout, target: Layout, links: Links) -> PlannedResharding:
    """Between meshes of (hosts, data, tensor), by the link that is measured between the first workers of both."""
    hosts, data, shared = source.mesh
    assert source.mesh == target.mesh and hosts == 1
    sides = (
        MeshGroups(source.name, data, shared, source.hosts),
        MeshGroups(target.name, data, shared, target.hosts),
    )
    part = (tensor.shape[0] // data, *tensor.shape[1:])
    network = NetworkSpec(bandwidth_bytes_per_s=links.card_bytes_per_s, latency_s=links.latency_s)
    return reshard_tensor("h", (part, part), tensor.element_bytes, sides, network, differentiable=True)


ALIKE: Mapping[str, Planner] = {"planned": _as_a_job, "in pairs": plan_send_and_receive}
"""Of workers that share matrices each of a pair has the same: send and receive takes them so."""


@dataclass(frozen=True)
class Case:
    """Meshes of (hosts, workers of a host, ...), and what each dimension of them splits."""

    name: str
    source: tuple[tuple[int, ...], tuple[int | None, ...]]
    target: tuple[tuple[int, ...], tuple[int | None, ...]]
    ways: Mapping[str, Planner] = field(default_factory=lambda: PLANNERS)

    def layouts(self) -> tuple[Layout, Layout]:
        return (
            mesh_layout("source", mesh=self.source[0], split=self.source[1]),
            mesh_layout("target", mesh=self.target[0], split=self.target[1]),
        )


def _alike(data: int, tensor: int) -> Case:
    mesh = (1, data, tensor), (None, 0, None)
    return Case(
        f"{data * tensor}→{data * tensor}, data {data} x tensor {tensor}, a host each", mesh, mesh, ALIKE
    )


CASES = (
    Case("2→2, dim0/2 to dim1/2", ((2, 1), (0, None)), ((2, 1), (1, None))),
    Case("2→2, dim0/2 to replicated", ((2, 1), (0, None)), ((2, 1), (None, None))),
    Case("2→3, dim0/2 to dim0/3", ((2, 1), (0, None)), ((3, 1), (0, None))),
    Case("2→3, dim0/2 to replicated", ((2, 1), (0, None)), ((3, 1), (None, None))),
    Case("4→2, dim0/4 on 2 hosts to replicated on 1", ((2, 2), (0, 0)), ((1, 2), (None, None))),
    Case("4→2, dim0/4 on 2 hosts to dim1/2 on 2", ((2, 2), (0, 0)), ((2, 1), (1, None))),
    _alike(1, 2),
    _alike(2, 2),
    _alike(1, 4),
)


def main() -> int:
    options = _options()
    if reason := why_not():
        print(f"skipped: {reason}")
        return 0
    shape = (options.rows, options.rows)
    print(
        f"{options.mbit:g} Mbit/s each way and host, {shape[0]} x {shape[1]} int32, median of {options.repeats}\n"
    )
    print("| case | way | messages | planned s | measured s | measured / planned | measured / bound |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for number, case in enumerate(case for case in CASES if options.only in case.name):
        _bench(case, Tensor(shape, 4), options, number)
    return 0


def _bench(case: Case, tensor: Tensor, options: argparse.Namespace, number: int) -> None:
    from worker.transport.rendezvous import host_store

    source, target = case.layouts()
    hosts = list(dict.fromkeys(source.hosts + target.hosts))
    workers = [
        (f"{side.name}/{w}", hosts.index(host))
        for side in (source, target)
        for w, host in enumerate(side.hosts)
    ]
    with network(len(hosts), options.prefix, options.subnet) as net:
        net.set_rate(options.mbit * 1e6)
        store = host_store()
        store.set_timeout(timedelta(seconds=600))
        prefix = f"case{number}"
        last = workers[-1][0]
        local = next((a for a, host in workers[:-1] if host == workers[-1][1]), None)
        sizes = (tensor.bytes // 4, 1)
        pairs = [("source/0", last), *([(local, last)] if local else [])]
        measure = [(a, b, size) for a, b in pairs for size in sizes]
        job = {
            "names": [name for name, _ in workers],
            "host": net.host,
            "port": store.port,
            "prefix": prefix,
            "elements": tensor.elements,
            "measure": measure,
            "plans": len(case.ways),
            "repeats": options.repeats,
        }
        processes = [_start(net, host, {**job, "name": name}) for name, host in workers]
        try:
            seconds = [_read(store, f"{prefix}/measured/{k}/{last}") for k in range(len(measure))]
            links = _links(tensor.bytes // 4, seconds)
            for k, (way, make) in enumerate(case.ways.items()):
                plan = make(tensor, source, target, links)
                store.set(f"{prefix}/plan/{k}", json.dumps(plan.to_json()))
                found = [_read(store, f"{prefix}/result/{k}/{name}") for name, _ in workers]
                spans = [
                    max(end for _, end in one) - max(begin for begin, _ in one)
                    for one in zip(*found, strict=True)
                ]
                _print(case, way, plan, statistics.median(spans))
            for process in processes:
                process.wait(60)
        finally:
            for process in processes:
                process.kill()


def _start(net: Network, host: int, job: dict) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.resharding_worker",
        json.dumps({**job, "address": net.addresses[host]}),
    ]
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # namespaces have no names of hosts
    return net.run(host, command, cwd=Path(__file__).parents[2], env=environment)


def _links(size: int, seconds: list[float]) -> Links:
    """What was measured, as the planner's links: of a card, and of the loopback where it is used."""
    card = size / max(seconds[0] - seconds[1], 1e-9)
    if len(seconds) == 2:
        return Links(card_bytes_per_s=card, latency_s=seconds[1])
    return Links(card, size / max(seconds[2] - seconds[3], 1e-9), seconds[1], seconds[3])


def _read(store, key: str):
    store.wait([key], timedelta(seconds=600))
    return json.loads(store.get(key))


def _print(case: Case, way: str, plan: PlannedResharding, measured_s: float) -> None:
    print(
        f"| {case.name} | {way} | {len(plan.messages)} | {plan.makespan_s:.3f} | {measured_s:.3f} "
        f"| {measured_s / plan.makespan_s:.2f} | {measured_s / plan.lower_bound_s:.2f} |",
        flush=True,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of each card, each way")
    parser.add_argument("--rows", type=int, default=1536, help="rows and columns of the tensor")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="the cases whose names hold this")
    parser.add_argument("--prefix", default="slotreshard", help="of names of namespaces and devices")
    parser.add_argument("--subnet", default="10.213.79", help="its first three numbers")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
