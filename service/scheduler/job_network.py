"""The network of a job as each of its workers has it: of a node's one network card a share, where several use it at once.

Links are measured between the first workers of two meshes, while all others are silent. In a step worker w of one mesh
sends to worker w of the next while its neighbours do, and those of one node share its card, as in a resharding.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from service.scheduler.cut.unlike import MeshShare
from service.scheduler.model.fields import LinkSpec
from service.scheduler.model.spec import NetworkSpec, link_costs


def network_of_pairs(network: NetworkSpec, shares: Sequence[MeshShare], *, sums: bool = False) -> NetworkSpec:
    """The network in which the bandwidth between two meshes is that of one pair of workers, where their tensors go in pairs;
    for `sums`, in which workers go in pairs too, between all. What is resharded shares the cards by its own plan."""
    crowds = {
        (one.name, other.name): _pairs_of_a_card(one, other) if sums or one.in_pairs(other) else 1
        for one, other in itertools.permutations(shares, 2)
    }
    if max(crowds.values(), default=1) == 1:
        return network
    of_pair, links = link_costs(network), []
    for (source, target), crowd in crowds.items():
        bandwidth, latency_s = of_pair(source, target)
        links.append(
            LinkSpec(
                source=source,
                target=target,
                bandwidth_bytes_per_s=None if bandwidth is None else bandwidth / crowd,
                latency_s=latency_s,
            )
        )
    slowest = min((link.bandwidth_bytes_per_s for link in links if link.bandwidth_bytes_per_s), default=None)
    return network.model_copy(update={"bandwidth_bytes_per_s": slowest, "links": links})


def _pairs_of_a_card(one: MeshShare, other: MeshShare) -> int:
    """Of the pairs of workers that are on two nodes, how many begin or end on the same one at most."""
    pairs = [(here, there) for here, there in zip(one.nodes, other.nodes, strict=False) if here != there]
    ends = [Counter(here for here, _ in pairs), Counter(there for _, there in pairs)]
    return max((count for side in ends for count in side.values()), default=1)
