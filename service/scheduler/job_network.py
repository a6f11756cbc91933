"""The network of a job as each of its workers has it: of a node's one network card a share, where several use it at once.

Links are measured between the first workers of two meshes, while all others are silent. In a step worker w of one mesh
sends to worker w of the next while its neighbours do, and those of one node share its card, as in a resharding.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from service.scheduler.cut.unlike import MeshShare, card_bandwidth
from service.scheduler.model.fields import LinkSpec
from service.scheduler.model.spec import NetworkSpec, link_costs


def network_of_pairs(network: NetworkSpec, shares: Sequence[MeshShare], *, sums: bool = False) -> NetworkSpec:
    """The network in which the bandwidth between two meshes is that of one pair of workers, where their tensors go in pairs;
    for `sums`, in which workers go in pairs too, between all. What is resharded shares the cards by its own plan."""
    ways = list(itertools.permutations(shares, 2))
    resharded = [not sums and not one.in_pairs(other) for one, other in ways]
    of_pair, links, same = link_costs(network), [], True
    for (one, other), by_plan in zip(ways, resharded, strict=True):
        before, latency_s = of_pair(one.name, other.name)
        bandwidth = before if by_plan else _of_a_pair(network, one, other)
        same = same and bandwidth == before
        links.append(
            LinkSpec(source=one.name, target=other.name, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)
        )
    if same:
        return network
    rest = network.bandwidth_bytes_per_s
    if not any(resharded):
        rest = min((link.bandwidth_bytes_per_s for link in links if link.bandwidth_bytes_per_s), default=None)
    return network.model_copy(update={"bandwidth_bytes_per_s": rest, "links": links})


def _of_a_pair(network: NetworkSpec, one: MeshShare, other: MeshShare) -> float | None:
    """Bytes a second of the worst pair: of those on two nodes, most begin or end on the fullest."""
    away = [(here, there) for here, there in zip(one.nodes, other.nodes, strict=False) if here != there]
    if not away:
        return link_costs(network)(one.name, other.name)[0]
    card = card_bandwidth(network, one, other)
    fullest = max(count for side in zip(*away, strict=True) for count in Counter(side).values())
    return None if card is None else card / fullest
