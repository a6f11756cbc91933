"""Other cuts and other numbers of microbatches of a job, priced with what was measured of its meshes and links.

How much longer than its profile a mesh takes is the mesh's: layers that move to another one take as long as there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from service.scheduler.automatic import constructive_makespan
from service.scheduler.cut.recompute import Recompute
from service.scheduler.cut.starts import balanced, moved
from service.scheduler.model.spec import PipelineSpec, SpecError
from service.scheduler.partition import partition
from service.scheduler.why.measured import host_delays, slower_links, slower_meshes, sums, task_seconds
from service.scheduler.why.step import Step
from worker.model.errors import CutError
from worker.model.profile import LayerProfile, OptimizerState

_JUDGED = 60
"""Cuts that are judged at most."""


@dataclass(frozen=True)
class Layers:
    """What is known of a job beside its plan, and what of it may be chosen.

    `profiles` are of its layers by number of microbatches, `counts` the numbers that its batch allows, `begins` the
    names of the layers that begin its stages. Nothing of it need be there.
    """

    profiles: Mapping[int, LayerProfile]
    counts: Sequence[int] = ()
    begins: Sequence[str] = ()
    optimizer: OptimizerState | None = None
    recompute: Recompute = "none"
    action_s: float = 0.0


@dataclass(frozen=True)
class Move:
    """A cut with one border moved: `layer` goes from one stage to another."""

    layer: str
    source: str
    target: str
    spec: PipelineSpec
    begins: tuple[str, ...]


class Cuts:
    """Cuts of one job into as many stages as it has, on the meshes where they are."""

    def __init__(self, spec: PipelineSpec, step: Step, layers: Layers, recomputed: Sequence[str]) -> None:
        self._spec, self._step, self._layers, self._recomputed = spec, step, layers, recomputed
        self._profile = layers.profiles[spec.microbatches].corrected()
        self._names = [layer.name for layer in self._profile.layers]
        self._seen: dict[tuple[int, ...], float] = {}

    @classmethod
    def of(cls, spec: PipelineSpec, step: Step, layers: Layers, recomputed: Sequence[str]) -> Cuts | None:
        """None where the layers' costs are not known, or are of another model than the plan's."""
        profile = layers.profiles.get(spec.microbatches)
        if profile is None or len(layers.begins) != len(spec.stages) or len(spec.stages) < 2:
            return None
        names = {layer.name for layer in profile.layers}
        if not names.issuperset(layers.begins):
            return None
        cuts = cls(spec, step, layers, recomputed)
        try:
            found = cuts._unpriced(cuts.now)
        except (SpecError, CutError):
            return None
        return cuts if len(found.edges) == len(spec.edges) else None

    @cached_property
    def now(self) -> tuple[int, ...]:
        return tuple(self._names.index(name) for name in self._layers.begins)

    @cached_property
    def priced_now(self) -> PipelineSpec:
        """The job's own cut at the same prices as the others."""
        return self._priced(self._unpriced(self.now))

    def moves(self) -> Iterator[Move]:
        """The job's cut with one layer moved over one border, those that look best first."""
        found = []
        for begins in moved(self.now, len(self._names)):
            border = next(at for at, (a, b) in enumerate(zip(begins, self.now, strict=True)) if a != b)
            if abs(begins[border] - self.now[border]) == 1:
                found.append((self._judge(begins), border, begins))
        for judged_s, border, begins in sorted(found):
            if judged_s < float("inf"):
                back = begins[border] < self.now[border]
                layer = self._names[min(begins[border], self.now[border])]
                before, after = self._spec.stages[border - 1].name, self._spec.stages[border].name
                source, target = (before, after) if back else (after, before)
                priced = self._priced(self._unpriced(begins))
                yield Move(layer, source, target, priced, self._named(begins))

    def best(self, expired: Callable[[], bool]) -> tuple[PipelineSpec, tuple[str, ...]] | None:
        """The best cut that borders moved one by one reach; None where that is the job's own."""
        best = min((self.now, balanced(self._profile, len(self.now))), key=self._judge)
        while not expired() and len(self._seen) < _JUDGED:
            near = min(moved(best, len(self._names)), key=self._judge, default=best)
            if self._judge(near) >= self._judge(best) * (1 - 1e-9):
                break
            best = near
        if best == self.now or self._judge(best) == float("inf"):
            return None
        return self._priced(self._unpriced(best)), self._named(best)

    def _named(self, begins: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(self._names[index] for index in begins)

    def _judge(self, begins: tuple[int, ...]) -> float:
        if begins not in self._seen:
            try:
                self._seen[begins] = constructive_makespan(self._priced(self._unpriced(begins)))
            except (SpecError, CutError):
                self._seen[begins] = float("inf")
        return self._seen[begins]

    def _unpriced(self, begins: tuple[int, ...]) -> PipelineSpec:
        spec = self._spec
        numbers = {mesh.name: number for number, mesh in enumerate(spec.meshes)}
        return partition(
            self._profile,
            stages=len(spec.stages),
            meshes=spec.meshes,
            cut=self._named(begins),
            microbatches=spec.microbatches,
            network=spec.network,
            schedule=spec.schedule,
            overlap=spec.overlap,
            split_backward=spec.split_backward,
            max_in_flight=spec.max_in_flight,
            placement=[numbers[stage.mesh] for stage in spec.stages],
            optimizer=self._layers.optimizer,
            recompute=self._layers.recompute,
            action_s=self._layers.action_s,
        ).spec

    @cached_property
    def _factors(self) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
        """By mesh and by link: how many times as long as their profile they took."""
        now = self._unpriced(self.now)
        profiled = task_seconds(now, self._step, self._recomputed)
        on_paper = sum_by(self._step, profiled)
        meshes = sums(self._step, lambda task: task.mesh if task.target is None else None)
        links = sums(self._step, lambda task: task.link)
        return (
            {name: found.measured_s / on_paper[name] for name, found in meshes.items() if on_paper[name] > 0},
            {link: found.ratio for link, found in links.items()},
        )

    def _priced(self, spec: PipelineSpec) -> PipelineSpec:
        meshes, links = self._factors
        return slower_links(slower_meshes(spec, meshes, host_delays(self._step)), links)


def sum_by(step: Step, seconds: Sequence[float]) -> dict[str, float]:
    """By mesh, the seconds of its compute actions."""
    found: dict[str, float] = {}
    for task, lasts_s in zip(step.tasks, seconds, strict=True):
        if task.target is None:
            found[task.mesh] = found.get(task.mesh, 0.0) + lasts_s
    return found


def with_microbatches(
    spec: PipelineSpec, count: int, layers: Layers, fixed_s: Mapping[str, float]
) -> PipelineSpec:
    """The measured spec with the batch in `count` microbatches.

    By the layers' profiles at both numbers where they are known; else what an action takes besides its layers
    (`fixed_s` by mesh) stays as it is, and the rest is as much shorter as the microbatch is smaller.
    """
    share = spec.microbatches / count
    here, there = layers.profiles.get(spec.microbatches), layers.profiles.get(count)
    by = share
    if here is not None and there is not None:
        before = sum(layer.compute_s for layer in here.layers)
        by = sum(layer.compute_s for layer in there.layers) / before if before > 0 else share

    def bytes_of(size: int | None) -> int | None:
        return None if size is None else round(size * share)

    stages = []
    for stage in spec.stages:
        kept_s = fixed_s.get(stage.mesh, 0.0)

        def cost(seconds: float, kept_s: float = kept_s) -> float:
            return max(0.0, seconds - kept_s) * by + min(seconds, kept_s)

        again = stage.recompute
        if again is not None:
            again = again.model_copy(
                update={
                    "activation_bytes": bytes_of(again.activation_bytes),
                    "rematerialised_bytes": bytes_of(again.rematerialised_bytes),
                    "extra_s": again.extra_s * by,
                }
            )
        stages.append(
            stage.model_copy(
                update={
                    "forward_s": cost(stage.forward_s),
                    "backward_input_s": cost(stage.backward_input_s),
                    "backward_weight_s": cost(stage.backward_weight_s),
                    "backward_s": None if stage.backward_s is None else cost(stage.backward_s),
                    "activation_bytes": bytes_of(stage.activation_bytes),
                    "weight_stash_bytes": bytes_of(stage.weight_stash_bytes),
                    "rematerialised_bytes": bytes_of(stage.rematerialised_bytes),
                    "recompute": again,
                }
            )
        )
    edges = [
        edge.model_copy(
            update={
                "forward_s": None if edge.forward_s is None else edge.forward_s * share,
                "backward_s": None if edge.backward_s is None else edge.backward_s * share,
                "forward_bytes": bytes_of(edge.forward_bytes),
                "backward_bytes": bytes_of(edge.backward_bytes),
            }
        )
        for edge in spec.edges
    ]
    return spec.model_copy(update={"microbatches": count, "stages": stages, "edges": edges})
