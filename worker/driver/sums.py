"""What sums over the workers of a mesh take, in every mesh at once: for REDUCE, and for matrices that are shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from worker.driver.gang import Gang
from worker.driver.limits import Limits
from worker.driver.report import Reporter
from worker.job import Job
from worker.model.sum_costs import SumCosts, slowest
from worker.model.update_costs import UpdateCosts
from worker.node import own_node_address
from worker.reasons import Reason
from worker.transport.rendezvous import serve_rendezvous

SUM_LIMIT_S = 60.0


@dataclass(frozen=True)
class Sums:
    """Of the slowest mesh, between workers that have other samples (`data`) and that share matrices (`tensor`); the workers
    of the meshes `alone` have all samples."""

    data: SumCosts | None
    tensor: SumCosts | None
    alone: tuple[str, ...]

    def added_to(self, costs: UpdateCosts, job: Job, gang: Gang) -> UpdateCosts:
        """What REDUCE and STEP cost with the sums of gradients, and with what workers that share matrices agree on."""
        shares = {mesh.name: tensor for mesh in gang.meshes if (tensor := job.tensor_of(mesh.name)) > 1}
        if shares and self.tensor is not None:
            costs = costs.with_agreeing(shares, self.tensor.reduce)
        if self.data is None:
            return costs
        if sharded := job.sharded:
            shared = {
                mesh.name: len(mesh.workers) // job.tensor_of(mesh.name)
                for mesh in gang.meshes
                if mesh.name in sharded
            }
            costs = costs.with_sharing(shared, self.data.scatter, self.data.gather)
        return costs.with_sum(*self.data.reduce, self.alone)


def measure_sums(
    job: Job, gang: Gang, *, reporter: Reporter, limits: Limits, interrupted: Callable[[], None]
) -> Sums | None:
    """None where each mesh has one worker. Raises AttemptFailure as `Gang.call`."""
    if job.resources.workers_per_mesh == 1:
        return None
    nodes = [address.node for address in gang.addresses]
    alone = tuple(mesh.name for mesh in gang.meshes if len(mesh.workers) == job.tensor_of(mesh.name))
    stores = {
        mesh.name: serve_rendezvous(own_node_address(), nodes)
        for mesh in gang.meshes
        if len(mesh.workers) > 1
    }
    measured = gang.call(
        [
            worker.measure_sum.remote(
                store=stores[address.mesh][1], host=address.node, connect_s=limits.connect_s
            )
            for worker, address in zip(gang.workers, gang.addresses, strict=True)
            if address.mesh in stores
        ],
        what=f"summing over the workers in each of {len(stores)} meshes",
        limit_s=2 * limits.connect_s + SUM_LIMIT_S,
        timeout_reason=Reason.START_TIMEOUT,
        interrupted=interrupted,
    )
    found = Sums(slowest([one.data for one in measured]), slowest([one.tensor for one in measured]), alone)
    for what, costs in (
        ("summing gradients over the workers of a mesh", found.data),
        ("summing over workers that share matrices", found.tensor),
    ):
        if costs is not None:
            latency_s, bandwidth = costs.reduce
            reporter.event("sums_measured", f"{what}: {bandwidth:.3g} bytes a second after {latency_s:.2g} s")
    return found
