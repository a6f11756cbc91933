"""`python -m tests.benchmarks.recomputation`: whole and selective recomputation beside keeping everything (10 minutes).

Two tables for a GPT and a U-Net. What a stage of the whole model keeps of a microbatch, and takes for a step of one:
by its profile, and measured in turn. And planned steps of four meshes within less and less memory, with
whole recomputation alone (the profile without its selective figures) and with both.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from service.scheduler.job.cut import PipelineSetup
from service.scheduler.job.partition import partition
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import MeshSpec, NetworkSpec, SpecError
from service.scheduler.programs.plan import Plan
from tests.worker.engine.engine_support import LocalPipeline, serial_programs
from worker.benchmark.layer_costs import measure_layers
from worker.contract.profile import LayerProfile
from worker.examples import gpt, unet
from worker.model.export import TracedModel, trace

ROUNDS = 15
MESHES, MICROBATCHES = 4, 16
NETWORK = NetworkSpec(bandwidth_bytes_per_s=1e9, latency_s=1e-4, contention="link")
SCHEDULES = ("gpipe", "1f1b", "auto")
SHARES = (0.85, 0.7, 0.55, 0.4, 0.3)
BUDGET_S = 1.0


@dataclass(frozen=True)
class Model:
    """A model, a microbatch of it, and a loss."""

    name: str
    model: nn.Module
    inputs: Tensor
    target: Tensor

    @staticmethod
    def loss(output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy of words, mean square of pictures."""
        if target.is_floating_point():
            return functional.mse_loss(output, target)
        return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def models() -> list[Model]:
    torch.manual_seed(0)
    words, pictures = torch.randint(256, (4, 256)), torch.randn(4, 1, 64, 64)
    return [
        Model("GPT, 8 blocks of 256", gpt.build(layers=8, width=256, heads=4, length=256), words, words),
        Model("U-Net, 32 channels", unet.build(width=32, levels=2), pictures, pictures),
    ]


def main() -> int:
    torch.set_num_threads(1)
    for model in models():
        traced = trace(model.model, (model.inputs,))
        profile = measure_layers(traced, model.loss, model.target)
        print(f"\n{model.name}\n", flush=True)
        kept_table(model, traced, profile)
        print()
        planned_table(profile)
    return 0


def kept_table(model: Model, traced: TracedModel, profile: LayerProfile) -> None:
    """One stage: bytes from F to B, and the time of a step of one microbatch, planned and measured."""
    print("| the stage | kept from F to B | step by the profile | measured | over keeping all |")
    print("|---|---|---|---|---|")
    ways = ("none", "selective", "all")
    first = profile.layers[0].name
    stages = {
        way: partition(
            profile,
            PipelineSetup([MeshSpec(name="m0")], NETWORK, recompute=way, split_backward=False),
            stages=1,
            cut=[first],
            microbatches=1,
        ).spec.stages[0]
        for way in ways
    }
    measured_s = measured_steps(model, traced, first)
    for way in ways:
        stage, option = stages[way], stages[way].recompute
        kept = stage.activation_bytes if option is None else option.activation_bytes
        step_s = stage.forward_s + stage.whole_backward_s + (0.0 if option is None else option.extra_s)
        label = {"none": "keeps all", "selective": "recomputes but for products", "all": "recomputes"}[way]
        print(
            f"| {label} | {kept / 1e6:.1f} MB | {step_s * 1e3:.0f} ms | {measured_s[way] * 1e3:.0f} ms | "
            f"{measured_s[way] / measured_s['none']:.2f} |",
            flush=True,
        )


def measured_steps(model: Model, traced: TracedModel, first: str) -> dict[str, float]:
    """Medians of processor seconds of steps of one microbatch, by the way to recompute."""
    graph = traced.cut([first])
    programs = serial_programs(graph, ["m0"], 1)
    pipelines = {
        way: LocalPipeline(
            graph,
            ["m0"],
            programs,
            1,
            loss=model.loss,
            recomputed=recomputed,
            selective=selective,
            optimizer=functools.partial(torch.optim.SGD, lr=0.0),
        )
        for way, recomputed, selective in (("none", (), ()), ("selective", {0}, {0}), ("all", {0}, ()))
    }
    seconds: dict[str, list[float]] = {way: [] for way in pipelines}
    for round_number in range(ROUNDS + 1):
        for way, pipeline in pipelines.items():
            started = time.process_time()
            pipeline.step(round_number, [([(model.inputs,)], [model.target])])
            seconds[way].append(time.process_time() - started)
    for pipeline in pipelines.values():
        pipeline.close()
    return {way: statistics.median(times[1:]) for way, times in seconds.items()}


def planned_table(profile: LayerProfile) -> None:
    """Planned makespans of four meshes with shares of the memory that the fullest takes without a limit."""
    whole_only = replace(profile, layers=tuple(replace(layer, selective_s=None) for layer in profile.layers))
    print(
        "| schedule | memory of each mesh | whole alone | recompute | both | recompute, of them selectively | gain |"
    )
    print("|---|---|---|---|---|---|---|")
    for schedule in SCHEDULES:
        free = planned(profile, schedule, [None] * MESHES)
        assert free is not None
        fullest = max(mesh.peak_memory_bytes or 0 for mesh in free.meshes)
        print(f"| {schedule} | no limit, {fullest / 1e6:.0f} MB | {cells(free)} | {cells(free, True)} | |")
        for share in SHARES:
            limits = [int(fullest * share)] * MESHES
            before, both = planned(whole_only, schedule, limits), planned(profile, schedule, limits)
            gain = "" if before is None or both is None else f"{before.makespan_s / both.makespan_s:.2f}"
            print(f"| | {share:.0%} | {cells(before)} | {cells(both, True)} | {gain} |", flush=True)


def planned(profile: LayerProfile, schedule: str, limits: Sequence[int | None]) -> Plan | None:
    """The plan of four stages within memory limits; None where nothing fits."""
    try:
        spec = partition(
            profile,
            PipelineSetup(
                [MeshSpec(name=f"m{i}", memory_bytes=limit) for i, limit in enumerate(limits)],
                NETWORK,
                schedule=schedule,
                recompute="auto",
            ),
            stages=MESHES,
            cut=[profile.layers[len(profile.layers) * s // MESHES].name for s in range(MESHES)],
            microbatches=MICROBATCHES,
        ).spec
        return make_plan(spec, budget_s=BUDGET_S)
    except SpecError:
        return None


def cells(plan: Plan | None, both: bool = False) -> str:
    if plan is None:
        return "nothing fits | "
    again = sum(stage.recomputed for stage in plan.stages)
    selective = sum(stage.selective for stage in plan.stages)
    return f"{plan.makespan_s * 1e3:.0f} ms | {again}" + (f", {selective}" if both else "")


if __name__ == "__main__":
    sys.exit(main())
