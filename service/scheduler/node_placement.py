"""Places the workers of all meshes on nodes by topology: whole meshes, one accelerator type each, neighbours near.

The best of all placements that hold is, in this order: with the fewest meshes spread over nodes, with the nodes of a
spread mesh nearest to each other, with the least bytes times distance between meshes. A tensor-parallel group is never
spread, and a mesh never has accelerators of two types. Equal choices: the order of nodes and meshes decides. Small
clusters are searched exactly by branch and bound, large ones by best-fit greedy placement in the tightest domain that
holds the job, improved by swaps; all limits count work and no time, so equal input has equal output.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.scheduler.problem.spec import PipelineSpec

SAME_NODE, SAME_NVLINK_DOMAIN, SAME_RACK, SAME_ZONE, ELSEWHERE = range(5)
_EXACT_LIMIT = 20_000
"""Partial placements that branch and bound looks at before it settles for the best one so far."""
_SWAP_LIMIT = 10_000
_ALIKE = 2.0
_WIDE = 500_000
"""Meshes times nodes from which one greedy pass has to do."""


class PlacementError(Exception):
    """The message says what does not fit, with its numbers; `final` where it would not fit on idle nodes either."""

    def __init__(self, message: str, *, final: bool = False):
        super().__init__(message)
        self.final = final


@dataclass(frozen=True)
class Node:
    """A node with `free` of `total` accelerators; a label that it lacks is None and equals no other."""

    name: str
    free: int
    total: int
    accelerator_type: str | None = None
    nvlink_domain: str | None = None
    rack: str | None = None
    zone: str | None = None


@dataclass(frozen=True)
class MeshShape:
    """A mesh of `workers`, of which `tensor` next to each other are a tensor-parallel group."""

    workers: int
    tensor: int = 1


@dataclass(frozen=True)
class Placement:
    """`nodes` has the name of the node of each worker of each mesh; `spread` counts the nodes of meshes beyond one each;
    `bytes_distance` is the sum over pairs of meshes of bytes times distance. `optimal` where the search was exhaustive."""

    nodes: tuple[tuple[str, ...], ...]
    spread: int
    bytes_distance: float
    optimal: bool


Pair = tuple[int, int]
Share = tuple[tuple[int, int], ...]
"""The nodes of a mesh, each with its number of workers."""


def place(
    nodes: Sequence[Node],
    meshes: Sequence[MeshShape],
    bytes_between: Mapping[Pair, float],
    *,
    seconds_per_byte: Mapping[tuple[str, str], float] | None = None,
) -> Placement:
    """The best placement of `meshes` on the free accelerators of `nodes`.

    `bytes_between` are the bytes of a step between two meshes, by their numbers, of both directions together.
    `seconds_per_byte` are measured links by names of nodes; of a pair that is measured both ways the slower one counts.
    Pairs that were not measured are as far as the median of measured ones of their level. Without measurements distances are
    0 on a node, then 1 (NVLink domain), 2 (rack), 3 (zone), 4. Raises PlacementError.
    """
    _check_room(nodes, meshes)
    cluster = _Cluster(nodes, seconds_per_byte or {})
    search = _Search(cluster, meshes, bytes_between)
    found = search.greedy()
    if found is not None:
        found = search.swapped(found)
    found, exhaustive = search.exact(found)
    if found is None:
        raise PlacementError(_no_room(nodes, meshes, exhaustive=exhaustive))
    spread, _, cost = search.objective(found)
    names = [tuple(cluster.names[node] for node, workers in share for _ in range(workers)) for share in found]
    return Placement(tuple(names), spread, cost, exhaustive)


def without_noise(
    nodes: Sequence[Node], seconds_per_byte: Mapping[tuple[str, str], float]
) -> dict[tuple[str, str], float]:
    """The measured links, each as the median of its level where it is within a factor of _ALIKE of it: measurements of
    equal links differ, and a job should not move for that."""
    cluster = _Cluster(nodes, {})
    number_of = {name: number for number, name in enumerate(cluster.names)}
    level_of = {
        ends: cluster.level(*(number_of[name] for name in ends))
        for ends in seconds_per_byte
        if ends[0] != ends[1] and number_of.keys() >= {*ends}
    }
    costs: dict[int, list[float]] = {}
    for ends, level in level_of.items():
        costs.setdefault(level, []).append(seconds_per_byte[ends])
    medians = {level: statistics.median(found) for level, found in costs.items()}
    return {
        ends: medians[level]
        if 1 / _ALIKE <= seconds_per_byte[ends] / medians[level] <= _ALIKE
        else seconds_per_byte[ends]
        for ends, level in level_of.items()
    }


def _check_room(nodes: Sequence[Node], meshes: Sequence[MeshShape]) -> None:
    largest = max((node.total for node in nodes), default=0)
    for number, mesh in enumerate(meshes):
        if mesh.workers < 1 or mesh.tensor < 1 or mesh.workers % mesh.tensor:
            raise ValueError(
                f"mesh m{number} has {mesh.workers} workers in tensor-parallel groups of {mesh.tensor}"
            )
        if mesh.tensor > largest:
            raise PlacementError(
                f"a tensor-parallel group of mesh m{number} has {mesh.tensor} workers, and no node can hold it: the largest "
                f"has {largest} accelerators; choose a smaller tensor, or add larger nodes",
                final=True,
            )
    needed, free = sum(mesh.workers for mesh in meshes), sum(node.free for node in nodes)
    if needed > free:
        raise PlacementError(f"{needed} accelerators are needed, {free} are free")


def _no_room(nodes: Sequence[Node], meshes: Sequence[MeshShape], *, exhaustive: bool) -> str:
    free: dict[str, list[int]] = {}
    for node in nodes:
        if node.free:
            free.setdefault(node.accelerator_type or "accelerators", []).append(node.free)
    offered = "; ".join(
        f"{kind}: {', '.join(map(str, sorted(counts, reverse=True)[:20]))}"
        for kind, counts in sorted(free.items())
    )
    largest = max(meshes, key=lambda mesh: (mesh.tensor, mesh.workers))
    return (
        f"{len(meshes)} meshes of up to {largest.workers} workers of one accelerator type, in tensor-parallel groups of up "
        f"to {largest.tensor} on one node, {'do not fit' if exhaustive else 'found no place'} on what is free on each node "
        f"({offered})"
    )


def exchanged_bytes(spec: PipelineSpec) -> dict[Pair, float]:
    """The bytes of a microbatch between each two meshes of a planned job, by their places in the spec, both directions
    together; the seconds where the spec has transfer times."""
    place_of = {mesh.name: place for place, mesh in enumerate(spec.meshes)}
    mesh_of = {stage.name: place_of[stage.mesh] for stage in spec.stages}
    timed = any(edge.forward_bytes is None for edge in spec.edges)
    exchanged: dict[Pair, float] = {}
    for edge in spec.edges:
        source, target = sorted((mesh_of[edge.source], mesh_of[edge.target]))
        sizes = (edge.forward_s, edge.backward_s) if timed else (edge.forward_bytes, edge.backward_bytes)
        if source != target:
            exchanged[source, target] = exchanged.get((source, target), 0.0) + sum(
                size or 0 for size in sizes
            )
    return exchanged


class _Cluster:
    """Nodes sorted by domain, so that every domain is a range of them, and the distances between them."""

    def __init__(self, nodes: Sequence[Node], seconds_per_byte: Mapping[tuple[str, str], float]):
        keys = [_domains(node) for node in nodes]
        order = sorted(range(len(nodes)), key=lambda n: ([_sortable(key) for key in keys[n][::-1]], n))
        self.names = [nodes[n].name for n in order]
        self.free = np.array([nodes[n].free for n in order], dtype=np.int64)
        kinds = {
            kind: code for code, kind in enumerate(dict.fromkeys(node.accelerator_type for node in nodes))
        }
        self.kinds = np.array([kinds[nodes[n].accelerator_type] for n in order], dtype=np.int64)
        self.kind_count = len(kinds)
        self.domains = [
            [(n, n + 1) for n in range(len(order))],
            *(_ranges([keys[n][level] for n in order]) for level in range(3)),
            [(0, len(order))] * len(order),
        ]
        """By level the range of nodes that are in the same domain as a node."""
        self.classes = [(keys[n], nodes[n].accelerator_type) for n in order]
        self._measured: dict[int, dict[int, float]] = {}
        self.level_distances = self._measure(seconds_per_byte)

    @property
    def interchangeable(self) -> bool:
        """True where nodes with equal labels are equally far from all others."""
        return not self._measured

    def level(self, first: int, second: int) -> int:
        for level, domains in enumerate(self.domains):
            begin, end = domains[first]
            if begin <= second < end:
                return level
        raise AssertionError("the last domain is the cluster")

    def measured_from(self, node: int) -> Collection[int]:
        """The nodes to which a link from `node` was measured."""
        return self._measured.get(node, {})

    def distance(self, first: int, second: int) -> float:
        if first == second:
            return self.level_distances[SAME_NODE]
        measured = self._measured.get(first, {}).get(second)
        return self.level_distances[self.level(first, second)] if measured is None else measured

    def distances(self, node: int) -> np.ndarray:
        """[nodes] of the distances from `node`."""
        row = np.full(len(self.names), self.level_distances[ELSEWHERE])
        for level in (SAME_ZONE, SAME_RACK, SAME_NVLINK_DOMAIN, SAME_NODE):
            begin, end = self.domains[level][node]
            row[begin:end] = self.level_distances[level]
        for other, distance in self._measured.get(node, {}).items():
            row[other] = distance
        return row

    def _measure(self, seconds_per_byte: Mapping[tuple[str, str], float]) -> list[float]:
        number_of = {name: number for number, name in enumerate(self.names)}
        by_level: dict[int, list[float]] = {}
        for (source, target), cost in sorted(seconds_per_byte.items()):
            first, second = number_of.get(source), number_of.get(target)
            if first is None or second is None or first == second:
                continue
            slower = max(cost, seconds_per_byte.get((target, source), 0.0))
            self._measured.setdefault(first, {})[second] = slower
            self._measured.setdefault(second, {})[first] = slower
            by_level.setdefault(self.level(first, second), []).append(slower)
        if not by_level:
            return [float(level) for level in range(5)]
        medians = {level: statistics.median(costs) for level, costs in by_level.items()}
        nearest = {
            level: min(medians, key=lambda known: (abs(known - level), known)) for level in range(1, 5)
        }
        distances = [0.0, *(medians[known] * level / known for level, known in nearest.items())]
        self._measured = {
            first: own
            for first, others in self._measured.items()
            if (own := {b: cost for b, cost in others.items() if cost != distances[self.level(first, b)]})
        }
        return distances


def _domains(node: Node) -> tuple[Any, Any, Any]:
    """The NVLink domain, rack and zone of a node, each with those around it: names repeat in other zones."""
    return (
        None if node.nvlink_domain is None else (node.zone, node.rack, node.nvlink_domain),
        None if node.rack is None else (node.zone, node.rack),
        None if node.zone is None else (node.zone,),
    )


def _sortable(key: tuple[str | None, ...] | None) -> tuple[str, ...]:
    return () if key is None else tuple("" if part is None else f"={part}" for part in key)


def _ranges(keys: Sequence[Any]) -> list[Pair]:
    """The range of equal keys around each place; a place without a key is alone."""
    ranges: list[Pair] = []
    begin = 0
    for place, key in enumerate(keys):
        if place and (key is None or key != keys[place - 1]):
            begin = place
        ranges.append((begin, place))
    end = len(keys)
    for place in range(len(keys) - 1, -1, -1):
        if place + 1 < len(keys) and ranges[place + 1][0] == place + 1:
            end = place + 1
        ranges[place] = (ranges[place][0], end)
    return ranges


class _Search:
    """Places the meshes of one job on one cluster; a placement in progress is a list with the Share of each mesh."""

    def __init__(self, cluster: _Cluster, meshes: Sequence[MeshShape], bytes_between: Mapping[Pair, float]):
        self._cluster, self._meshes = cluster, meshes
        self._neighbours: list[dict[int, float]] = [{} for _ in meshes]
        for (first, second), size in bytes_between.items():
            if first != second and size:
                for mesh, other in ((first, second), (second, first)):
                    self._neighbours[mesh][other] = self._neighbours[mesh].get(other, 0.0) + size
        self._order = sorted(range(len(meshes)), key=lambda mesh: (-meshes[mesh].workers, mesh))
        self._needed = sum(mesh.workers for mesh in meshes)

    def objective(self, placed: Sequence[Share]) -> tuple[int, float, float]:
        """(nodes of meshes beyond one each, distances within spread meshes, bytes times distance); less is better."""
        cost = sum(
            size * self._apart(placed[mesh], placed[other])
            for mesh, neighbours in enumerate(self._neighbours)
            for other, size in neighbours.items()
            if mesh < other
        )
        return sum(len(share) - 1 for share in placed), sum(map(self._inner, placed)), cost

    def _apart(self, first: Share, second: Share) -> float:
        return max(self._cluster.distance(a, b) for a, _ in first for b, _ in second)

    def _inner(self, share: Share) -> float:
        return sum(self._cluster.distance(a, b) for (a, _), (b, _) in itertools.combinations(share, 2))

    # greedy

    def greedy(self) -> list[Share] | None:
        """The best of greedy passes in the tightest domain of each level that has room for all; None where none ends."""
        wide = len(self._meshes) * len(self._cluster.names) > _WIDE
        best: list[Share] | None = None
        for scope in self._scopes():
            for roomy in (True, False):
                found = self._pass(scope, roomy=roomy)
                if found is not None and (best is None or self.objective(found) < self.objective(best)):
                    best = found
                if wide and best is not None and all(len(share) == 1 for share in best):
                    return best
        return best

    def _scopes(self) -> list[Pair]:
        """The domain of each level with the least room that has enough."""
        free = self._cluster.free
        total = np.concatenate(([0], np.cumsum(free)))
        scopes = []
        for domains in self._cluster.domains:
            rooms = {pair: int(total[pair[1]] - total[pair[0]]) for pair in dict.fromkeys(domains)}
            if fitting := [pair for pair, room in rooms.items() if room >= self._needed]:
                scopes.append(min(fitting, key=lambda pair: (rooms[pair], pair)))
        return list(dict.fromkeys(scopes))

    def _pass(self, scope: Pair, *, roomy: bool) -> list[Share] | None:
        """Place one mesh after the other nearest to its neighbours; between equals on the node with the most room, or
        where it fits best."""
        free = np.zeros_like(self._cluster.free)
        free[scope[0] : scope[1]] = self._cluster.free[scope[0] : scope[1]]
        placed: list[Share | None] = [None] * len(self._meshes)
        for mesh in self._order:
            shape = self._meshes[mesh]
            node = self._nearest(mesh, placed, free, roomy=roomy)
            if node is not None:
                share: Share | None = ((node, shape.workers),)
            else:
                share = self._spread(shape, free, self._costs(mesh, placed))
            if share is None:
                return None
            placed[mesh] = share
            for node, workers in share:
                free[node] -= workers
        return placed

    def _nearest(self, mesh: int, placed: list[Share | None], free: np.ndarray, *, roomy: bool) -> int | None:
        """The node with room for the whole mesh that is nearest to its neighbours.

        Domains are nested: all nodes of the smallest domain of a neighbour around the best node are as good, so that one
        node of each domain of a neighbour is looked at, and those with a measured link.
        """
        workers, cluster = self._meshes[mesh].workers, self._cluster

        def best_of(begin: int, end: int) -> int | None:
            room = free[begin:end]
            if not roomy:
                room = np.where(room >= workers, room, np.iinfo(np.int64).max)
            found = begin + int(room.argmax() if roomy else room.argmin())
            return found if free[found] >= workers else None

        around = {node for other in self._neighbours[mesh] if placed[other] for node, _ in placed[other]}
        candidates: list[int] = []
        for node in sorted(around):
            ranges = dict.fromkeys(domains[node] for domains in cluster.domains[:ELSEWHERE])
            for found in (best_of(*pair) for pair in ranges):
                if found is not None:
                    candidates.append(found)
                    if len(around) == 1:
                        break
            candidates += [other for other in cluster.measured_from(node) if free[other] >= workers]
        if not candidates:
            return best_of(0, len(free))
        if len(set(candidates)) == 1:
            return candidates[0]

        def rank(node: int) -> tuple[float, int, int]:
            placed[mesh] = ((node, workers),)
            return self._cost_of(mesh, placed), -int(free[node]) if roomy else int(free[node]), node

        nearest = min(dict.fromkeys(candidates), key=rank)
        placed[mesh] = None
        return nearest

    def _costs(self, mesh: int, placed: Sequence[Share | None]) -> np.ndarray:
        """[nodes] of the bytes times distance to the neighbours of `mesh` that are placed."""
        costs = np.zeros(len(self._cluster.names))
        for other, size in self._neighbours[mesh].items():
            if (share := placed[other]) is not None:
                rows = [self._cluster.distances(node) for node, _ in share]
                costs += size * (rows[0] if len(rows) == 1 else np.max(rows, axis=0))
        return costs

    def _spread(self, shape: MeshShape, free: np.ndarray, costs: np.ndarray) -> Share | None:
        """The share on the fewest nodes that hold the mesh in whole tensor-parallel groups, near to each other."""
        groups, rooms = shape.workers // shape.tensor, free // shape.tensor
        fewest, kinds = len(rooms) + 1, []
        for kind in range(self._cluster.kind_count):
            largest = np.sort(rooms[self._cluster.kinds == kind])[::-1].cumsum()
            if len(largest) and largest[-1] >= groups:
                count = int(np.searchsorted(largest, groups)) + 1
                kinds = [kind] if count < fewest else [*kinds, kind] if count == fewest else kinds
                fewest = min(fewest, count)
        best: tuple[tuple[float, float], Share] | None = None
        for kind in kinds:
            own = np.where(self._cluster.kinds == kind, rooms, 0)
            seeds = np.lexsort((-own, costs))
            seeds = seeds[own[seeds] > 0][:4]
            for seed in dict.fromkeys([*seeds.tolist(), int(np.argmax(own))]):
                chosen = self._around(seed, own, costs, fewest, groups)
                if chosen is None:
                    continue
                share = _fill(chosen, own, groups, shape.tensor)
                rank = (self._inner(share), float(costs[chosen].max()))
                if best is None or rank < best[0]:
                    best = (rank, share)
        return None if best is None else best[1]

    def _around(
        self, seed: int, rooms: np.ndarray, costs: np.ndarray, count: int, groups: int
    ) -> list[int] | None:
        """`count` nodes with `seed`, in its tightest domain where they have room for `groups`."""
        for domains in self._cluster.domains:
            begin, end = domains[seed]
            others = np.lexsort((costs[begin:end], -rooms[begin:end])) + begin
            chosen = [seed, *[node for node in others[:count].tolist() if node != seed][: count - 1]]
            if len(chosen) == count and rooms[chosen].sum() >= groups:
                return chosen
        return None

    # improvement

    def swapped(self, placed: list[Share]) -> list[Share]:
        """`placed` after swaps of two meshes of one size, as long as they bring meshes nearer and for _SWAP_LIMIT tries."""
        placed, tries, better = list(placed), 0, True
        while better:
            better = False
            for first, second in itertools.combinations(range(len(placed)), 2):
                if (tries := tries + 1) > _SWAP_LIMIT:
                    return placed
                if self._meshes[first] != self._meshes[second] or placed[first] == placed[second]:
                    continue
                before = self._cost_of(first, placed) + self._cost_of(second, placed)
                placed[first], placed[second] = placed[second], placed[first]
                if self._cost_of(first, placed) + self._cost_of(second, placed) < before * (1 - 1e-9):
                    better = True
                else:
                    placed[first], placed[second] = placed[second], placed[first]
        return placed

    def _cost_of(self, mesh: int, placed: Sequence[Share | None]) -> float:
        """Bytes times distance to the neighbours of `mesh` that are placed, the mesh itself too."""
        return sum(
            size * self._apart(placed[mesh], placed[other])
            for other, size in self._neighbours[mesh].items()
            if placed[other] is not None
        )

    # exact

    def exact(self, best: list[Share] | None) -> tuple[list[Share] | None, bool]:
        """A better placement than `best`, or `best`; and whether the search ended before its limit."""
        free = self._cluster.free.tolist()
        placed: list[Share | None] = [None] * len(self._meshes)
        least_spread = self._least_spread()
        bound = None if best is None else self.objective(best)
        left = _EXACT_LIMIT

        def extend(depth: int, so_far: tuple[int, float, float]) -> None:
            nonlocal best, bound, left
            if depth == len(self._order):
                best, bound = list(placed), so_far
                return
            mesh, (spread, inner, cost) = self._order[depth], so_far
            most = len(free) if bound is None else bound[0] - spread - least_spread[depth + 1] + 1
            left -= len(free) // 20  # those that are looked through for each
            for share in self._shares(mesh, free, most):
                if (left := left - 1) < 0:
                    return
                if not share:
                    continue
                placed[mesh] = share
                now = (
                    spread + len(share) - 1,
                    inner + self._inner(share),
                    cost + self._cost_of(mesh, placed),
                )
                hopeless = bound is not None and (now[0] + least_spread[depth + 1], *now[1:]) >= bound
                if not hopeless:
                    for node, workers in share:
                        free[node] -= workers
                    extend(depth + 1, now)
                    for node, workers in share:
                        free[node] += workers
                placed[mesh] = None

        if len(self._order) <= 200:  # each is a level of recursion
            extend(0, (0, 0.0, 0.0))
            return best, left >= 0
        return best, False

    def _least_spread(self) -> list[int]:
        """A lower bound, by depth, of the nodes beyond one each that the meshes from there on need, each on idle nodes."""
        largest = np.sort(self._cluster.free)[::-1].cumsum()
        least = [0]
        for mesh in reversed(self._order):
            least.append(least[-1] + int(np.searchsorted(largest, self._meshes[mesh].workers)))
        return least[::-1]

    def _shares(self, mesh: int, free: Sequence[int], most: int) -> Iterator[Share]:
        """Every share of up to `most` nodes that `free` allows, those of fewer nodes first; of untouched nodes with equal
        labels the first. An empty one for what was tried in vain, as work is counted by the caller."""
        shape, kinds = self._meshes[mesh], self._cluster.kinds
        nodes = self._distinct(free, shape.tensor)
        for node in sorted(nodes, key=lambda node: (free[node], node)):
            if free[node] >= shape.workers:
                yield ((node, shape.workers),)
        groups = shape.workers // shape.tensor
        nodes = [node for node in range(len(free)) if free[node] >= shape.tensor]
        for count in range(2, min(groups, len(nodes), most) + 1):
            for chosen in itertools.combinations(nodes, count):
                rooms = [free[node] // shape.tensor for node in chosen]
                if sum(rooms) < groups or len({int(kinds[node]) for node in chosen}) > 1:
                    yield ()
                    continue
                for parts in _compositions(groups, rooms):
                    yield tuple((node, part * shape.tensor) for node, part in zip(chosen, parts, strict=True))

    def _distinct(self, free: Sequence[int], least: int) -> list[int]:
        nodes = [node for node in range(len(free)) if free[node] >= least]
        if not self._cluster.interchangeable:
            return nodes
        untouched: dict[Any, int] = {}
        touched = []
        for node in nodes:
            if free[node] != self._cluster.free[node]:
                touched.append(node)
            else:
                untouched.setdefault((self._cluster.classes[node], free[node]), node)
        return [*touched, *untouched.values()]


def _fill(chosen: Sequence[int], rooms: np.ndarray, groups: int, tensor: int) -> Share:
    share = []
    for node in sorted(chosen, key=lambda node: (-int(rooms[node]), node)):
        taken = min(int(rooms[node]), groups)
        groups -= taken
        if taken:
            share.append((node, taken * tensor))
    return tuple(share)


def _compositions(total: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as a sum of one positive number up to each of `limits`, larger first parts first."""
    if len(limits) == 1:
        if 1 <= total <= limits[0]:
            yield (total,)
        return
    for first in range(min(limits[0], total - len(limits) + 1), 0, -1):
        for others in _compositions(total - first, limits[1:]):
            yield (first, *others)
