"""`python -m tests.benchmarks.recomputation`: the methods of recomputing beside keeping everything (15 minutes).

Two tables for a GPT and a U-Net. What a stage of the whole model keeps of a microbatch, and takes for a step of one:
by its profile, and measured in turn. And planned steps of four meshes within less and less memory, with whole
recomputation alone, with the selective one besides, and with that by block too.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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
from worker.contract.planned import RecomputeMethod, recompute_method
from worker.contract.profile import LayerProfile
from worker.examples import gpt, unet
from worker.model.export import TracedModel, trace

ROUNDS = 15
MESHES, MICROBATCHES = 4, 16
NETWORK = NetworkSpec(bandwidth_bytes_per_s=1e9, latency_s=1e-4, contention="link")
SCHEDULES = ("gpipe", "1f1b", "auto")
SHARES = (0.85, 0.7, 0.55, 0.4, 0.3)
BUDGET_S = 1.0
METHODS: tuple[RecomputeMethod, ...] = ("whole", "selective", "by_block")


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


LABELS = {
    "none": "keeps all",
    "selective": "recomputes but for products",
    "by_block": "recomputes by block",
    "all": "recomputes",
}


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
    print(
        "| the stage | kept from F to B | at most, 1 and 4 in flight | step by the profile | measured | over keeping all |"
    )
    print("|---|---|---|---|---|---|")
    ways = [*LABELS]
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
        again = 0 if option is None else option.rematerialised_bytes or 0
        most = " and ".join(f"{(count * kept + again) / 1e6:.1f} MB" for count in (1, 4))
        step_s = stage.forward_s + stage.whole_backward_s + (0.0 if option is None else option.extra_s)
        print(
            f"| {LABELS[way]} | {kept / 1e6:.1f} MB | {most} | {step_s * 1e3:.0f} ms | {measured_s[way] * 1e3:.0f} ms | "
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
            optimizer=functools.partial(torch.optim.SGD, lr=0.0),
        )
        for way, recomputed in (
            ("none", {}),
            ("selective", {0: "selective"}),
            ("by_block", {0: "by_block"}),
            ("all", {0: "whole"}),
        )
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
    print(
        "| schedule | memory of each mesh | whole alone | selective too | by block too | stages so | gain |"
    )
    print("|---|---|---|---|---|---|---|")
    for schedule in SCHEDULES:
        free = planned(profile, schedule, [None] * MESHES, METHODS)
        assert free is not None
        fullest = max(mesh.peak_memory_bytes or 0 for mesh in free.meshes)
        print(f"| {schedule} | no limit, {fullest / 1e6:.0f} MB | {length(free)} | | | | |")
        for share in SHARES:
            limits = [int(fullest * share)] * MESHES
            plans = [planned(profile, schedule, limits, METHODS[:count]) for count in (1, 2, 3)]
            before, last = plans[0], plans[-1]
            gain = "" if before is None or last is None else f"{before.makespan_s / last.makespan_s:.2f}"
            cells = " | ".join(map(length, plans))
            print(f"| | {share:.0%} | {cells} | {stages_by_method(last)} | {gain} |", flush=True)


def planned(
    profile: LayerProfile, schedule: str, limits: Sequence[int | None], methods: Sequence[RecomputeMethod]
) -> Plan | None:
    """The plan of four stages, which may recompute by `methods`, within memory limits; None where nothing fits."""
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
        stages = [
            stage.with_recompute_options(
                option for method, option in stage.recompute_options.items() if method in methods
            )
            for stage in spec.stages
        ]
        return make_plan(spec.model_copy(update={"stages": stages}), budget_s=BUDGET_S)
    except SpecError:
        return None


def length(plan: Plan | None) -> str:
    return "nothing fits" if plan is None else f"{plan.makespan_s * 1e3:.0f} ms"


def stages_by_method(plan: Plan | None) -> str:
    if plan is None:
        return ""
    counts = Counter(recompute_method(dict(stage)) for stage in plan.stages if stage.recomputed)
    return ", ".join(f"{counts[method]} {method.replace('_', ' ')}" for method in METHODS if counts[method])


if __name__ == "__main__":
    sys.exit(main())
