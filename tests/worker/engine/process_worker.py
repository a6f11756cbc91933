"""The worker processes of a gloo pipeline: python process_worker.py <json>. Prints their answers as JSON.

torch is imported once and every worker is a fork of this process, which never computes itself.
Faults are planted here by name, so that tests see real processes die, stop and raise.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch

from tests.worker.engine import engine_support as support
from worker.contract.planned import MeshProgram
from worker.engine.results import RunOptions, SlotLimits
from worker.transport.base import EngineError, Topology
from worker.transport.gloo import GlooTransport
from worker.transport.nccl import NcclTransport

GRAPHS = {
    "chain": lambda: support.chain(4),
    "skips": support.skips,
    "branches": support.two_branches,
    "tied": support.tied_chain,
}


def plant(fault, graph):
    """Make the third forward (or the first backward) of stage `fault["stage"]` go wrong."""
    stage = graph.stages[fault["stage"]]
    run, calls = stage._function, []

    def faulty(module, *inputs):
        calls.append(1)
        outputs = run(module, *inputs)
        if len(calls) < fault.get("call", 3):
            return outputs
        match fault["kind"]:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stopped":
                # to this thread: to the process, another thread would take it, and this one go on meanwhile
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case "sleeps":
                time.sleep(3600)
            case "illegal address":
                _read_an_illegal_address(outputs[0])
            case "raises":
                raise KeyError("planted in forward")
            case "raises in backward":
                outputs[0].register_hook(_raise)
            case "nan":
                outputs = tuple(output * float("nan") for output in outputs)
            case "shape":
                outputs = tuple(output[:1] for output in outputs)
        return outputs

    stage._function = faulty


def share_gpu(rank):
    """Several ranks on one GPU: to NCCL each looks like a host of its own."""
    os.environ.setdefault("NCCL_HOSTID", f"slotline-{rank}")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    torch.cuda.set_device(rank % torch.cuda.device_count())


def _read_an_illegal_address(tensor):
    """Only on CUDA: no process can go on with the GPU after it."""
    code = "template <typename T> T illegal(T x) { return x + *reinterpret_cast<volatile T*>(16); }"
    torch.cuda.jiterator._create_jit_fn(code)(tensor.detach())


def _raise(gradient):
    raise KeyError("planted in backward")


def work(job):
    """One worker's run; what it has to say."""
    graph = GRAPHS[job["graph"]]()
    mesh, worker, mesh_of_stage = job["mesh"], job["worker"], job["mesh_of_stage"]
    if job.get("fault") and job["fault"]["mesh"] == mesh:
        if job["fault"]["kind"] == "absent":
            return None
        plant(job["fault"], graph)
    programs = support.serial_programs(graph, mesh_of_stage, job["microbatches"])
    common = {
        "mesh": mesh,
        "worker": worker,
        "store": ("127.0.0.1", job["port"]),
        "connect_timeout_s": job.get("connect_s", 30.0),
    }
    device = job.get("options", {}).get("device", "cpu")
    topology = Topology(tuple(job["meshes"]), job["workers"])
    if device == "cuda":
        share_gpu(topology.rank(mesh, worker))
        transport = NcclTransport(topology, **common)
        for stage in graph.stages:
            stage.to(device)
    else:
        transport = GlooTransport(topology, host="127.0.0.1", **common)
    engine = support.make_engine(
        transport,
        MeshProgram(programs[mesh], job["microbatches"]),
        graph,
        mesh_of_stage,
        loss=support.squared_error,
        optimizer=support.Recorder,
        options=RunOptions(limits=SlotLimits(1.0, job.get("limit_s", 30.0)), **job.get("options", {})),
    )
    answer = {"mesh": mesh, "worker": worker, "losses": [], "error": None}
    began = time.monotonic()
    try:
        engine.connect()
        for step in range(job["steps"]):
            began = time.monotonic()
            result = engine.run_step(step, *support.batch(job["microbatches"], seed=10 * worker + step))
            answer["losses"].append(result.losses)
            answer["norm"] = result.grad_norm
        answer["parameters"] = {k: v.tolist() for k, v in engine.state()["parameters"].items()}
    except EngineError as error:
        answer["error"] = type(error).__name__
        answer["message"] = str(error)
        answer["failed_after_s"] = time.monotonic() - began
    started = time.monotonic()
    answer["stuck"] = engine.close()
    answer["closed_s"] = time.monotonic() - started
    answer["threads"] = [t.name for t in threading.enumerate() if t.name.startswith("slotline")]
    return answer


def main():
    torch.set_num_threads(1)
    job = json.loads(sys.argv[1])
    keys = [(mesh, worker) for mesh in job["meshes"] for worker in range(job["workers"])]
    processes = {}
    for mesh, worker in keys:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            faulthandler.dump_traceback_later(150)  # to standard error: where it stands, should it hang
            os.write(write, json.dumps(work({**job, "mesh": mesh, "worker": worker})).encode())
            os._exit(0)
        os.close(write)
        processes[mesh, worker] = pid, read
    answers = []
    for key in sorted(keys, key=lambda key: key[0] in job["never_ends"]):
        pid, read = processes[key]
        if key[0] in job["never_ends"]:
            os.kill(pid, signal.SIGKILL)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        os.waitpid(pid, 0)
        answers.append([key, json.loads(text) if text else None])
    print(json.dumps(answers))


main()
