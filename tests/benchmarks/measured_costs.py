"""Planning with costs as measured, and the cut of a model beside cuts that ignore the schedule.

`python -m tests.benchmarks.measured_costs [--quick]`; part of `make bench`. Writes nothing.
"""

from __future__ import annotations

import argparse
import sys
import time

SIZES = [(4, 8), (4, 32), (8, 32), (16, 32), (20, 40), (40, 64), (64, 128), (64, 512)]
QUICK = [(4, 8), (8, 32), (20, 40)]
SPEEDS = [1e6, 1e5, 3e4]  # bytes a second, where a layer takes about 28 ms and sends about 1,000 bytes


def planning(sizes: list[tuple[int, int]], budget_s: float, *, as_jobs: bool) -> None:
    """Distance to the bound and seconds, log-normal stages and links with skips, without and with memory limits."""
    from service.scheduler.planner import make_plan
    from service.scheduler.problem.spec_checks import load_spec
    from tests.service.scheduler.specs import measured

    print("Stages may recompute, backwards run whole or in two parts:" if as_jobs else "Costs alone:")
    print("meshes  microbatches  memory  makespan s  above the bound  proven  seconds  notes")
    for meshes, microbatches in sizes:
        for memory in (None, 0.6 * meshes):
            spec = load_spec(
                measured(meshes, microbatches, meshes + microbatches, memory=memory, as_jobs=as_jobs)
            )
            started = time.monotonic()
            plan = make_plan(spec, budget_s=budget_s)
            print(
                f"{meshes:6}  {microbatches:12}  {'-' if memory is None else f'{memory:.1f}':>6}  "
                f"{plan.makespan_s:10.4f}  {plan.makespan_s / plan.lower_bound_s - 1:15.2%}  "
                f"{plan.proven_optimal!s:>6}  {time.monotonic() - started:7.1f}  {len(plan.notes)}",
                flush=True,
            )


def cuts(budget_s: float) -> None:
    """The chosen cut beside others, each planned with the same budget: makespans in units of the chosen one."""
    from service.scheduler.job.cut import PipelineSetup, balanced_cut, equal_layers_cut
    from service.scheduler.job.joint import JointSearchRequest, plan_jointly
    from service.scheduler.job.partition import partition
    from service.scheduler.planner import make_plan
    from tests.service.scheduler.job.test_joint import measured, meshes, network

    skips = ((1, 22), (4, 19), (7, 16))
    models = {
        "chain of blocks": measured(24, 1),
        "U-Net skips": measured(24, 2, skips=skips),
        "encoder to every decoder block": measured(24, 3, skips=tuple((11, i) for i in range(13, 24))),
        "heavy head": measured(24, 4, head=8.0),
    }
    print("model                           bytes/s  chosen s  equal layers  balanced  formula  seconds")
    for name, profile in models.items():
        for speed in SPEEDS:
            started = time.monotonic()
            found = plan_jointly(
                JointSearchRequest({8: profile}, PipelineSetup(meshes(4), network(speed)), stages=[4]),
                budget_s=budget_s,
            )
            seconds = time.monotonic() - started
            ratios = []
            for begins in (equal_layers_cut(24, 4), balanced_cut(profile, 4), None):
                cut = "auto" if begins is None else [f"l{i}" for i in begins]
                other = partition(
                    profile, PipelineSetup(meshes(4), network(speed)), stages=4, cut=cut, microbatches=8
                )
                ratios.append(make_plan(other.spec, budget_s=budget_s).makespan_s / found.plan.makespan_s)
            print(
                f"{name:30}  {speed:8.0e}  {found.plan.makespan_s:8.4f}  {ratios[0]:12.3f}  {ratios[1]:8.3f}  "
                f"{ratios[2]:7.3f}  {seconds:7.1f}",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--budget-s", type=float, default=10.0)
    given = parser.parse_args()
    for as_jobs in (False, True):
        planning(QUICK if given.quick else SIZES, given.budget_s, as_jobs=as_jobs)
        print()
    cuts(given.budget_s / 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
