"""Which gradients a job's meshes sum as soon as they are there, from what was measured of its layers: the plan with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from service.scheduler.cut.layers import layer_ranges
from service.scheduler.cut.unlike import profile_of_mesh
from service.scheduler.job_across import SumsAcross
from service.scheduler.joint import JobPlan, longest
from service.scheduler.reduces import Sums, reduces_end_s, with_reduces
from worker.buckets import Gradient
from worker.model.profile import LayerProfile
from worker.model.update_costs import UpdateCosts, mesh_update


def planned_reduces(
    found: JobPlan,
    profile: LayerProfile,
    costs: UpdateCosts,
    workers: Mapping[str, int],
    across: SumsAcross | None = None,
) -> JobPlan:
    """`found` with the sums over the `workers` of each mesh as slots of its plan; as it is where nobody measured sums.

    What several meshes hold is summed over them first, as `across` tells, and stays behind the last backward.
    """
    spec = found.partition.spec
    names = [layer.name for layer in profile.layers]
    begins = [names.index(begin) for begin in found.partition.begins]
    layers: dict[str, list[int]] = {mesh.name: [] for mesh in spec.meshes}
    users: dict[str, list[int]] = {}
    for index, (stage, (first, end)) in enumerate(
        zip(spec.stages, layer_ranges(begins, len(names)), strict=True)
    ):
        layers[stage.mesh].extend(range(first, end))
        for layer in profile.layers[first:end]:
            for name in layer.parameters:
                if index not in users.setdefault(name, []):
                    users[name].append(index)
    number = {mesh.name: index for index, mesh in enumerate(spec.meshes)}
    sums: dict[str, Sums] = {}
    for mesh, count in workers.items():
        cost = costs.sum_of(mesh)
        if count < 2 or cost is None:
            continue
        gradients = [
            Gradient(name, tuple(stages), profile_of_mesh(profile, number[mesh]).parameter_sizes[name], "")
            for name, stages in users.items()
            if name not in profile.frozen_parameters and {spec.stages[k].mesh for k in stages} == {mesh}
        ]
        if gradients:
            sums[mesh] = Sums(gradients, cost.seconds)
    if not sums:
        return found
    plan = with_reduces(spec, found.plan, sums)
    update = tuple(
        mesh_update(
            mesh,
            of_mesh,
            profile_of_mesh(profile, number[mesh]),
            costs,
            early={g.name for g in sums[mesh].gradients} if mesh in sums else (),
        )
        for mesh, of_mesh in layers.items()
    )
    if across is not None:
        update = across.added(update, profile, list(layers.values()))
    tail_s = max(0.0, reduces_end_s(plan) - plan.makespan_s)
    return replace(found, plan=plan, update=update, update_s=tail_s + longest(update))
