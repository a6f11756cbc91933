"""Price and bandwidth of NCCL's communicators, as the transport makes them.

`python -m tests.gpu_check.connections communicators` or `bandwidth` starts a process a rank and prints a finding. Ranks
take the GPUs in turn; where there are fewer, several share one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore

from tests.gpu_check.runner import Figure, Finding
from tests.worker.jobs.job_process import take_gpu
from worker.transport.base import Topology
from worker.transport.nccl import NcclSettings, NcclTransport
from worker.transport.rendezvous import host_store

CHAIN = 8
"""Meshes of the chain whose communicators are counted: an interior one has four pairs and a group."""
VARIANTS: Mapping[str, Mapping[str, str]] = {
    "as shipped": {},
    "NCCL_RUNTIME_CONNECT=0": {"NCCL_RUNTIME_CONNECT": "0"},
    "NCCL_RUNTIME_CONNECT=1": {"NCCL_RUNTIME_CONNECT": "1"},
    "expandable_segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}
CHANNELS = (1, 2, 4, 8, 16)
SIZES_MIB = (1, 16, 128)
_RANKS_LIMIT_S = 200.0
_BARRIER_LIMIT = timedelta(seconds=120)


class RanksError(RuntimeError):
    """A rank ended without an answer; the message is the end of what the first such rank printed."""


def run_ranks(what: str, count: int, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """The answers of `count` processes that each run `what`; RanksError where one has none within the limit."""
    store = host_store("127.0.0.1")
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.gpu_check.connections",
                what,
                str(rank),
                str(count),
                str(store.port),
            ],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    ends_s, outputs, late = time.monotonic() + _RANKS_LIMIT_S, [], False
    try:
        for process in processes:
            try:
                outputs.append(process.communicate(timeout=max(0.1, ends_s - time.monotonic()))[0])
            except subprocess.TimeoutExpired:
                late = True
                process.kill()
                outputs.append(process.communicate()[0])
    finally:
        for process in processes:
            process.kill()
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        if process.returncode or not output.strip():
            limit = f"not done after {_RANKS_LIMIT_S:g} s: " if late else ""
            last = (output.strip().splitlines() or ["it printed nothing"])[-1]
            raise RanksError(f"{limit}rank {rank} ended with status {process.returncode}: {last}")
    return [json.loads(output.strip().splitlines()[-1]) for output in outputs]


class Rank:
    """One rank of a chain of meshes, with its GPU and a transport that is not connected yet."""

    def __init__(self, rank: int, count: int, port: int):
        self.rank, self._count, self._barriers = rank, count, 0
        take_gpu(rank, count)
        torch.ones(2048, 2048, device="cuda") @ torch.ones(
            2048, 2048, device="cuda"
        )  # CUDA's and cuBLAS's own memory
        self.meshes = tuple(f"m{k}" for k in range(count))
        self.store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        NcclSettings(max_p2p_channels=int(os.environ.get("SLOTLINE_NCCL_MAX_P2P_CHANNELS", "2"))).apply()
        self.transport = NcclTransport(
            Topology(self.meshes), mesh=self.meshes[rank], worker=0, store=("127.0.0.1", port)
        )

    def barrier(self) -> None:
        """Wait until the device is idle and all ranks are here."""
        torch.cuda.synchronize()
        self._barriers += 1
        name = f"gpu-check/{self._barriers}"
        if self.store.add(name, 1) == self._count:
            self.store.set(f"{name}/all", "1")
        self.store.wait([f"{name}/all"], _BARRIER_LIMIT)

    def chain(self) -> tuple[tuple[str, str], ...]:
        """Both directions of each pair of neighbours."""
        return tuple(
            pair for a, b in zip(self.meshes, self.meshes[1:], strict=False) for pair in ((a, b), (b, a))
        )


def communicator_rank(rank: Rank) -> dict[str, Any]:
    """What connecting took: bytes of this rank's GPU, which others may share, bytes of shared memory of the machine,
    threads of this process, seconds."""
    rank.barrier()
    before, began = _held(), time.monotonic()
    rank.transport.connect({"world": tuple(range(len(rank.meshes)))}, rank.chain())
    seconds = time.monotonic() - began
    rank.barrier()
    after = _held()
    rank.barrier()
    rank.transport.close()
    return {
        "device": torch.cuda.current_device(),
        "seconds": seconds,
        **{key: after[key] - before[key] for key in before},
    }


def _held() -> dict[str, int]:
    free, total = torch.cuda.mem_get_info()
    return {
        "gpu_bytes": total - free,
        "shared_bytes": shutil.disk_usage("/dev/shm").used,  # also of files whose names NCCL has removed
        "threads": len(os.listdir("/proc/self/task")),
    }


def communicators() -> Finding:
    """The price of a chain's communicators and one group; fails where they cannot be made as shipped."""
    ends = 4 * (CHAIN - 1) + CHAIN
    figures, failure = [], None
    for name, environment in VARIANTS.items():
        try:
            answers = run_ranks("communicators", CHAIN, environment)
        except RanksError as error:
            figures.append(Figure(name, "failed", str(error)))
            failure = failure or (str(error) if not environment else None)
            continue
        gpu_bytes = sum({answer["device"]: answer["gpu_bytes"] for answer in answers}.values())
        figures += [
            Figure(
                f"{name}: GPU memory",
                f"{gpu_bytes / ends / 1e6:.0f} MB",
                f"an end of a communicator, of {ends} ends in {CHAIN} workers: plans take it from the limit",
            ),
            Figure(
                f"{name}: shared memory",
                f"{max(answer['shared_bytes'] for answer in answers) / CHAIN / 1e6:.0f} MB",
                "of /dev/shm a worker",
            ),
            Figure(
                f"{name}: threads",
                f"{max(answer['threads'] for answer in answers)}",
                "more in the worker with the most",
            ),
            Figure(
                f"{name}: connecting",
                f"{max(answer['seconds'] for answer in answers):.1f} s",
                "of the slowest worker, with the self-test",
            ),
        ]
    return Finding(tuple(figures), failure)


def bandwidth_rank(rank: Rank) -> dict[str, Any]:
    """On rank 1 the bytes a second of each size from rank 0, and the seconds of a matrix product alone and beside a receive
    that waits."""
    rank.transport.connect({}, (("m0", "m1"),))
    answer: dict[str, Any] = {"bytes_per_s": {}}
    for size_mib in SIZES_MIB:
        tensor = torch.zeros(size_mib << 20, dtype=torch.uint8, device="cuda")
        for repeats in (3, 10):  # the first are not counted
            rank.barrier()
            began = time.monotonic()
            for repeat in range(repeats):
                if rank.rank == 0:
                    rank.transport.send("m1", repeat, tensor)
                else:
                    rank.transport.receive("m0", repeat, tensor)
            torch.cuda.synchronize()
            answer["bytes_per_s"][size_mib] = repeats * tensor.nbytes / (time.monotonic() - began)
    if rank.rank == 1:
        matrix = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
        answer["alone_s"] = _product_s(matrix)
        side = torch.cuda.Stream(priority=-1)
        with torch.cuda.stream(side):
            rank.transport.receive("m0", 99, tensor)
        answer["beside_s"] = _product_s(matrix)
        rank.store.set("gpu-check/timed", "1")
    else:
        rank.store.wait(["gpu-check/timed"], _BARRIER_LIMIT)
        rank.transport.send("m1", 99, tensor)
    rank.barrier()
    rank.transport.close()
    return answer


def _product_s(matrix: torch.Tensor, repeats: int = 20) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    matrix @ matrix
    begin.record()
    for _ in range(repeats):
        matrix @ matrix
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def bandwidth() -> Finding:
    """GB/s between two GPUs for each number of channels; fails where a transfer does."""
    figures = []
    for channels in CHANNELS:
        environment = {"SLOTLINE_NCCL_MAX_P2P_CHANNELS": str(channels)}
        try:
            _, answer = run_ranks("bandwidth", 2, environment)
        except RanksError as error:
            return Finding(tuple(figures), f"{channels} channels: {error}")
        speeds = ", ".join(f"{size} MiB {value / 1e9:.1f}" for size, value in answer["bytes_per_s"].items())
        figures += [
            Figure(
                f"{channels} channels", f"{speeds} GB/s", "one direction from GPU 0 to GPU 1, nothing beside"
            ),
            Figure(
                f"{channels} channels: a matrix product beside a waiting receive",
                f"{answer['beside_s'] / answer['alone_s']:.2f} times as long",
                "8192³ in bf16: a receive that waits keeps its multiprocessors busy",
            ),
        ]
    return Finding(tuple(figures))


def main() -> None:
    what, *of = sys.argv[1:]
    if not of:
        print({"communicators": communicators, "bandwidth": bandwidth}[what]().to_json())
        return
    rank, count, port = map(int, of)
    answer = {"communicators": communicator_rank, "bandwidth": bandwidth_rank}[what](Rank(rank, count, port))
    print(json.dumps(answer), flush=True)
    os._exit(0)  # NCCL's threads may outlive a plain exit


if __name__ == "__main__":
    main()
