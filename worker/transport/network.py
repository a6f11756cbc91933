"""What the transfers of a gang cost and share: which to measure, and the network that a plan assumes from it.

Pure values, light: no torch. How a transfer is measured is links.py's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

# Of two transfers at once, the part of the shorter one that the longer one had to wait for: 0 where they run
# beside each other, 1 where they run one after the other. From here on a plan takes them to share.
SHARES_FROM = 0.5
# Pairs (and as many triples) of meshes that are measured at most; the others are taken to be the slowest.
MAX_PROBES = 64
_REFERENCE_BYTES = 4 << 20

Kind = Literal["both ways", "two sends", "two receives"]


@dataclass(frozen=True)
class Probe:
    """What is measured at `hub`: its link with one peer in both ways, or its transfers with two peers at once."""

    hub: str
    peers: tuple[str, ...]


@dataclass(frozen=True)
class Link:
    """One way from `source` to `target`: a transfer of n bytes takes latency_s + n / bandwidth_bytes_per_s."""

    source: str
    target: str
    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class Together:
    """Seconds that two transfers of one size took, each alone and both at once.

    "both ways" are those of one pair of meshes; "two sends" and "two receives" those of one mesh and two peers.
    """

    kind: Kind
    alone_s: tuple[float, float]
    together_s: float

    @property
    def shared(self) -> float:
        """The part of the shorter transfer that the other one delayed: about 0 to about 1."""
        return (self.together_s - max(self.alone_s)) / max(min(self.alone_s), 1e-9)


@dataclass(frozen=True)
class Measured:
    """What one probe found."""

    links: tuple[Link, ...]
    together: tuple[Together, ...]

    def to_json(self, role_of: Mapping[str, int]) -> dict[str, Any]:
        """Plain values, with a number in place of each mesh's name."""
        return {
            "links": [
                [role_of[link.source], role_of[link.target], link.latency_s, link.bandwidth_bytes_per_s]
                for link in self.links
            ],
            "together": [[one.kind, *one.alone_s, one.together_s] for one in self.together],
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any], names: Sequence[str]) -> Measured:
        """The same with `names` for the numbers. KeyError, TypeError, ValueError, IndexError for anything else."""
        return cls(
            tuple(
                Link(names[source], names[target], float(latency_s), float(bandwidth))
                for source, target, latency_s, bandwidth in body["links"]
            ),
            tuple(
                Together(kind, (float(first), float(second)), float(both))
                for kind, first, second, both in body["together"]
            ),
        )


def contention_of(measurements: Sequence[Together]) -> str:
    """The contention model (DESIGN section 4) of these measurements: link, full-duplex or half-duplex.

    The strictest that any of them shows, since one model serves the whole plan; link without measurements.
    """
    sharing = {one.kind for one in measurements if one.shared >= SHARES_FROM}
    if "both ways" in sharing:
        return "half-duplex"
    return "full-duplex" if sharing else "link"


def slowest(links: Sequence[Link]) -> Link | None:
    """The link that a transfer of some megabytes notices most; None without links."""
    return max(
        links, key=lambda link: link.latency_s + _REFERENCE_BYTES / link.bandwidth_bytes_per_s, default=None
    )


def pairs_in_use(meshes: Sequence[str], *, loops: bool, skips: bool) -> list[tuple[str, str]]:
    """The pairs of meshes, earlier one first, between which stages may exchange tensors.

    Neighbours; last and first where stages go round (`loops`); all pairs where the model has `skips`.
    """
    pairs = list(itertools.pairwise(meshes))
    if loops and len(meshes) > 2:
        pairs.append((meshes[0], meshes[-1]))
    if skips:
        pairs += [pair for pair in itertools.combinations(meshes, 2) if pair not in set(pairs)]
    return pairs


def choose_probes(
    meshes: Sequence[str], node_of: Mapping[str, str], *, loops: bool, skips: bool
) -> list[Probe]:
    """What to measure: of pairs and of triples of meshes on the same nodes in the same order the first alone."""
    pairs: dict[tuple[str, ...], Probe] = {}
    for first, second in pairs_in_use(meshes, loops=loops, skips=skips):
        pairs.setdefault((node_of[first], node_of[second]), Probe(first, (second,)))
    triples: dict[tuple[str, ...], Probe] = {}
    for before, hub, after in zip(meshes, meshes[1:], meshes[2:], strict=False):
        nodes = (node_of[hub], *sorted((node_of[before], node_of[after])))
        triples.setdefault(nodes, Probe(hub, (before, after)))
    return [*list(pairs.values())[:MAX_PROBES], *list(triples.values())[:MAX_PROBES]]


def network_of(
    measured: Sequence[Measured],
    meshes: Sequence[str],
    node_of: Mapping[str, str],
    *,
    loops: bool,
    skips: bool,
) -> dict[str, Any]:
    """JSON of a NetworkSpec: contention, the slowest link for all, and a link for each directed pair in use.

    A pair that was not measured itself has the costs of the one on the same two nodes, or the slowest.
    """
    links = [link for one in measured for link in one.links]
    place = {mesh: index for index, mesh in enumerate(meshes)}

    def route(source: str, target: str) -> tuple[str, str, bool]:
        return node_of[source], node_of[target], place[source] < place[target]

    by_route = {route(link.source, link.target): link for link in links}
    pairs = pairs_in_use(meshes, loops=loops, skips=skips)
    directed = [way for first, second in pairs for way in ((first, second), (second, first))]
    default = slowest(links)
    return {
        "contention": contention_of([together for one in measured for together in one.together]),
        "bandwidth_bytes_per_s": default.bandwidth_bytes_per_s if default else None,
        "latency_s": default.latency_s if default else 0.0,
        "links": [
            {
                "source": source,
                "target": target,
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
                "latency_s": link.latency_s,
            }
            for source, target in directed
            if (link := by_route.get(route(source, target))) is not None
        ],
    }
