"""`python -m tests.benchmarks.varied`: orders chosen by mean makespans, beside the first plan and one chosen by medians.

Chains of four and eight even stages, 16 microbatches, on links that take a tenth of a forward. Nine steps of the first plan
are simulated with log-normal noise on every action and transfer; a shorter order is planned from their slots, once at the
medians of the costs and once by mean makespans. Each is then simulated for 200 further steps of other noise. Memory: what
1F1B holds on the first mesh (a microbatch for each stage), and so many microbatches more. Two minutes on one core.
"""

from __future__ import annotations

import sys

from tests.service.scheduler.specs import chain
from tests.service.scheduler.why import test_varied_costs as varied

NOISE = (0.0, 0.15, 0.3, 0.6)
ROOM = (0, 2, 4, None)


def main() -> int:
    varied.FRESH = 200
    print(
        "| stages | microbatches of room beyond 1F1B's | σ | the first plan | by medians | by means | gain |"
    )
    print("|---|---|---|---|---|---|---|")
    for stages in (4, 8):
        for room in ROOM:
            for noise in NOISE:
                print(row(stages, room, noise), flush=True)
    return 0


def row(stages: int, room: int | None, noise: float) -> str:
    data = chain(stages, 16, transfer=0.1, contention="link", schedule="auto")
    for mesh, stage in zip(data["meshes"], data["stages"], strict=True):
        stage["activation_bytes"], stage["weight_stash_bytes"] = 10, 5
        if room is not None:
            mesh["activation_limit_bytes"] = 10 * (stages + room)
    first, by_medians, _ = varied.replanned(data, noise, by_means=False)
    _, by_means, _ = varied.replanned(data, noise)
    before_s = varied.mean_of_fresh_steps(data, first, noise)
    cells = []
    for shorter in (by_medians, by_means):
        after_s = before_s if shorter is None else varied.mean_of_fresh_steps(data, shorter.plan, noise)
        cells.append("stays" if shorter is None else f"{after_s:.1f} s")
    where = "no limit" if room is None else str(room)
    return f"| {stages} | {where} | {noise} | {before_s:.1f} s | {' | '.join(cells)} | {before_s / after_s:.3f} |"


if __name__ == "__main__":
    sys.exit(main())
