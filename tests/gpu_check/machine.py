"""Facts of the machine: versions, driver, topology, memory, and the NCCL that torch and cupy load.

`python -m tests.gpu_check.machine facts` or `nccl` prints a finding.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys

import torch

from tests.gpu_check.runner import Figure, Finding
from worker.transport.base import ConnectError
from worker.transport.nccl import check_nccl_versions, load_nccl

_QUERY = ("index", "name", "uuid", "driver_version", "memory.total", "ecc.errors.uncorrected.volatile.total")
_DOCKERS_SHARED_MEMORY = 64 << 20


def facts() -> Finding:
    """Versions, each GPU as its driver tells it, topology, shared memory; fails where torch finds no GPU, a GPU has
    uncorrected errors of its memory, or shared memory is no larger than a container's default."""
    import_of = {name: _version(name) for name in ("cupy-cuda12x", "cupy-cuda13x", "ray", "transformers")}
    figures = [
        Figure("Python", platform.python_version(), "the tests' own"),
        Figure("torch", torch.__version__, f"built for CUDA {torch.version.cuda or '(none)'}"),
        *(Figure(name, version, "installed") for name, version in import_of.items() if version),
        Figure("processors", str(len(os.sched_getaffinity(0))), "cores that this process may use"),
        Figure(
            "host memory", _gib(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), "of the machine"
        ),
        Figure("locked memory", _locked_memory(), "limit of pinned memory and of RDMA: should be unlimited"),
    ]
    shared = shutil.disk_usage("/dev/shm")
    figures.append(
        Figure("/dev/shm", f"{_gib(shared.free)} free", "NCCL's proxies, Ray and loaders share it")
    )
    gpus, told = driver_rows(
        _output("nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader")
    )
    figures += told
    if topology := _output("nvidia-smi", "topo", "-m"):
        matrix = [
            " ".join(line.split()) for line in topology.partition("Legend")[0].splitlines() if line.strip()
        ]
        figures.append(
            Figure("topology", "; ".join(matrix), "NV: NVLink; PIX, PXB: PCIe; SYS: across processors")
        )
    failure = _why_no_gpu() or gpus
    if failure is None and shared.total <= _DOCKERS_SHARED_MEMORY:
        failure = f"/dev/shm has {shared.total >> 20} MiB, a container's default: start it with --shm-size=8g or more"
    count = torch.cuda.device_count()
    not_shown = ()
    if count == 1:
        not_shown = ("transfers between GPUs: on one GPU workers share it and NCCL goes over loopback",)
    return Finding(tuple(figures), failure, not_shown, count)


def driver_rows(text: str | None) -> tuple[str | None, list[Figure]]:
    """Why the GPUs of nvidia-smi's CSV cannot be used (None: they can), and a figure for each."""
    if not text:
        return None, [Figure("nvidia-smi", "none", "the driver's tool is missing or found no GPU")]
    figures, broken = [], []
    for line in text.strip().splitlines():
        index, name, uuid, driver, memory, errors = (cell.strip() for cell in line.split(","))
        figures.append(Figure(f"GPU {index}", f"{name}, {memory}, driver {driver}", uuid))
        figures.append(
            Figure(f"GPU {index}, uncorrected errors", errors, "of its memory since the driver was loaded")
        )
        if errors.isdigit() and int(errors):
            broken.append(f"GPU {index} ({uuid}) has {errors} uncorrected errors of its memory")
    return "; ".join(broken) + ": reset or replace it" if broken else None, figures


def nccl() -> Finding:
    """The versions of NCCL that torch was built for and that cupy loads; fails where they differ."""
    of_torch = torch.cuda.nccl.version()
    try:
        of_cupy = load_nccl().get_version()
        check_nccl_versions(of_torch, of_cupy)
    except ConnectError as error:
        return Finding(failure=str(error))
    figures = (
        Figure("torch's NCCL", ".".join(map(str, of_torch)), "the version that torch was built for"),
        Figure("cupy's NCCL", str(of_cupy), "the number of the library that both have loaded"),
    )
    return Finding(figures)


def _why_no_gpu() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a CUDA build"
    if torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except Exception as error:  # of CUDA: its own text names what is missing
        return f"torch finds no GPU; it is built for CUDA {torch.version.cuda}, and CUDA says: {error}"
    return f"torch finds no GPU; it is built for CUDA {torch.version.cuda}"


def _locked_memory() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


if __name__ == "__main__":
    print({"facts": facts, "nccl": nccl}[sys.argv[1]]().to_json())
