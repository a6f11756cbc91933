"""Layouts to try: the nine of the literature, and random ones; and a simulator that knows nothing of the planner."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from service.scheduler.resharding.layout import Layout, Links, Tensor, mesh_layout
from service.scheduler.resharding.resharding_plan import PlannedResharding

CUBE = Tensor((24, 24, 24), 2)
UNIT = Links(card_bytes_per_s=float(CUBE.bytes))
"""One second is the whole cube over one card; copies inside a host are free."""


@dataclass(frozen=True)
class Literature:
    """`split` for (hosts, accelerators); seconds of the planned and of the naive resharding with UNIT."""

    name: str
    source: tuple[tuple[int, int], tuple[int | None, int | None]]
    target: tuple[tuple[int, int], tuple[int | None, int | None]]
    planned_s: float
    naive_s: float

    def layouts(self) -> tuple[Layout, Layout]:
        return (
            mesh_layout("source", mesh=self.source[0], split=self.source[1]),
            mesh_layout("target", mesh=self.target[0], split=self.target[1]),
        )


ROWS, COLUMNS, DEPTHS = (0, None), (1, None), (2, None)
LITERATURE = (
    Literature("1: same split of dimension 0 over hosts", ((2, 4), ROWS), ((2, 4), ROWS), 0.5, 2.0),
    Literature("2: replicated to dim0/2", ((2, 4), (None, None)), ((2, 4), ROWS), 0.5, 2.0),
    Literature("3: dim1/2 to dim0/2", ((2, 4), COLUMNS), ((2, 4), ROWS), 0.5, 3.75),
    Literature("4: dim1/8 to dim0/8", ((2, 4), (1, 1)), ((2, 4), (0, 0)), 0.5, 0.9375),
    Literature("5: dim0/4 replicated 2 to dim0/2", ((2, 4), (None, 0)), ((2, 4), ROWS), 0.5, 3.5),
    Literature("6: dim0/2 on 2 hosts to dim0/3 on 3", ((2, 4), ROWS), ((3, 4), ROWS), 0.5, 4.0),
    Literature("7: dim0/4 on one host to replicated", ((1, 4), (None, 0)), ((2, 4), (None, None)), 1.0, 8.0),
    Literature("8: as 7", ((1, 4), (None, 0)), ((2, 4), (None, None)), 1.0, 8.0),
    Literature("9: dim1/2 to dim2/2", ((2, 4), COLUMNS), ((2, 4), DEPTHS), 0.5, 3.75),
)
"""Table 2 of Zhuang et al. 2022, with the layouts that its benchmark runs. Case 6 is replicated inside hosts only."""


def random_case(seed: int, largest: int = 12) -> tuple[Tensor, Layout, Layout, Links]:
    """Meshes of 1 to 3 dimensions on 1 to 4 hosts, tensors of 1 to 3 dimensions, pieces of uneven lengths."""
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, largest) for _ in range(draw.randint(1, 3)))
    shared = draw.random() < 0.15
    source = _random_layout(draw, "source", shape, "host" if shared else "source")
    target = _random_layout(draw, "target", shape, "host" if shared else "target")
    links = Links(
        card_bytes_per_s=draw.choice([1.0, 100.0]),
        local_bytes_per_s=draw.choice([None, 400.0, 1000.0]),
        latency_s=draw.choice([0.0, 0.0, 0.01]),
        local_latency_s=draw.choice([0.0, 0.0, 0.001]),
        cards_per_host=draw.choice([1, 1, 1, 2]),
    )
    return Tensor(shape, draw.choice([1, 2, 4])), source, target, links


def _random_layout(draw: random.Random, name: str, shape: tuple[int, ...], prefix: str) -> Layout:
    mesh = draw.choice([(1,), (2,), (3,), (4,), (1, 4), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (2, 2, 2)])
    split: list[int | None] = [draw.choice([None, *range(len(shape))]) for _ in mesh]
    sizes: list[tuple[int, ...] | None] = [None] * len(mesh)
    for d, dimension in enumerate(split):
        if dimension is not None and split.count(dimension) == 1 and draw.random() < 0.3:
            cuts = sorted(draw.randint(0, shape[dimension]) for _ in range(mesh[d] - 1))
            borders = [0, *cuts, shape[dimension]]
            sizes[d] = tuple(b - a for a, b in pairwise(borders))
    workers = int(np.prod(mesh))
    each = draw.choice([n for n in range(1, workers + 1) if workers % n == 0])
    hosts = tuple(f"{prefix}{w // each}" for w in range(workers))
    return mesh_layout(name, mesh=mesh, split=tuple(split), hosts=hosts, sizes=tuple(sizes))


def elements_of(given: Layout, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Flat numbers of the elements that each worker has: by asking every element, not by boxes."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    found = []
    for place in product(*(range(n) for n in given.mesh)):
        piece = numbers
        for d, dimension in enumerate(given.split):
            if dimension is None:
                continue
            if given.sizes[d] is not None:
                pieces = np.split(piece, np.cumsum(given.sizes[d])[:-1], axis=dimension)
            else:
                step = -(-piece.shape[dimension] // given.mesh[d])
                ends = [min(step * k, piece.shape[dimension]) for k in range(1, given.mesh[d])]
                pieces = np.split(piece, ends, axis=dimension)
            piece = pieces[place[d]]
        found.append(piece)
    return found


def simulate(plan: PlannedResharding, source: Layout, target: Layout) -> dict[str, Counter[int]]:
    """Run the messages one by one on sets of element numbers; how often each element arrived at each target worker.

    A message may carry only what its sender has by then, and must end before what waits for it starts.
    """
    numbers = np.arange(int(np.prod(plan.shape))).reshape(plan.shape)
    had: dict[str, dict[int, float]] = {}  # element -> since when
    for given in (source, target):
        for w, piece in enumerate(elements_of(given, plan.shape)):
            had[f"{given.name}/{w}"] = dict.fromkeys(piece.ravel().tolist(), 0.0) if given is source else {}
    arrived: dict[str, Counter[int]] = {name: Counter() for name in had}
    for message in plan.messages:
        box = tuple(slice(begin, end) for begin, end in plan.tiles[message.tile])
        carried = numbers[box].ravel()[message.begin : message.end].tolist()
        assert carried, f"{message} carries nothing"
        for element in carried:
            since = had[message.sender].get(element)
            assert since is not None, f"{message.sender} sends {element}, which it has not"
            assert since <= message.start_s * (1 + 1e-9) + 1e-12, (
                f"{message.sender} sends {element} too early"
            )
            had[message.receiver].setdefault(element, message.end_s)
            arrived[message.receiver][element] += 1
    return {name: counts for name, counts in arrived.items() if name.startswith(f"{target.name}/")}
