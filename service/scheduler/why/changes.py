"""Predicts the changes that would shorten a step most: each is planned with the measured costs.

Other cuts and other numbers of microbatches are among them. Quick plans only: the programs as they ran,
replayed, and constructive schedules; never the search. So a gain is a safe estimate, and the plan of a new
attempt may find more. All is compared with the median of what the microbatches took, the same for the step as
it is. A mesh's slowdown against its profile stays with the mesh: layers that move to another mesh take as long
as layers do there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from service.scheduler.auto.auto import constructive_makespan
from service.scheduler.auto.fixed_schedule import named_timeline
from service.scheduler.auto.recomputation import (
    may_recompute,
    with_recomputation,
    with_recompute_methods,
)
from service.scheduler.job.cut import PipelineSetup, Recompute, balanced_cut, neighbour_cuts
from service.scheduler.job.partition import partition
from service.scheduler.planner import find_timeline
from service.scheduler.problem.memory import peak_memory
from service.scheduler.problem.spec import MeshSpec, PipelineSpec, SpecError
from service.scheduler.problem.spec_checks import check_spec
from service.scheduler.schedules.registry import AUTO
from service.scheduler.why.causes import MIN_COST_SHARE
from service.scheduler.why.measured import (
    Change,
    ChangeKind,
    duration_text,
    host_delays,
    measured_spec,
    median_ratio,
    scale_links,
    scale_meshes,
    task_seconds,
    total_times_by,
)
from service.scheduler.why.step_graph import Link, StepGraph
from worker.contract.planned import recompute_method
from worker.contract.profile import CutError, LayerProfile, OptimizerState

_MAX_ESTIMATED_CUTS = 60
"""Cuts that are estimated at most."""


@dataclass(frozen=True)
class JobLayers:
    """The measurements and the search space of a job beside its plan; all of it may be missing.

    `profiles` are of its layers by number of microbatches, `counts` the numbers that its batch allows, `stage_starts`
    the names of the first layers of its stages.
    """

    profiles: Mapping[int, LayerProfile]
    counts: Sequence[int] = ()
    stage_starts: Sequence[str] = ()
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    recompute: Recompute = "none"
    action_s: float = 0.0


@dataclass(frozen=True)
class LayerMove:
    """A cut with one border moved: `layer` goes from one stage to another."""

    layer: str
    source: str
    target: str
    spec: PipelineSpec
    stage_starts: tuple[str, ...]


class CutSearch:
    """Cuts of one job into the same number of stages, on the same meshes."""

    def __init__(
        self, spec: PipelineSpec, step: StepGraph, layers: JobLayers, recomputed: Sequence[str]
    ) -> None:
        self._spec, self._step, self._layers, self._recomputed = spec, step, layers, recomputed
        self._profile = layers.profiles[spec.microbatches].corrected()
        self._names = [layer.name for layer in self._profile.layers]
        self._estimates: dict[tuple[int, ...], float] = {}

    @classmethod
    def of(
        cls, spec: PipelineSpec, step: StepGraph, layers: JobLayers, recomputed: Sequence[str]
    ) -> CutSearch | None:
        """The search of a job; None where its layers' costs are not known, or are of another model than the plan's."""
        profile = layers.profiles.get(spec.microbatches)
        if profile is None or len(layers.stage_starts) != len(spec.stages) or len(spec.stages) < 2:
            return None
        names = {layer.name for layer in profile.layers}
        if not names.issuperset(layers.stage_starts):
            return None
        cuts = cls(spec, step, layers, recomputed)
        try:
            spec_now = cuts._unpriced(cuts.now)
        except (SpecError, CutError):
            return None
        return cuts if len(spec_now.edges) == len(spec.edges) else None

    @cached_property
    def now(self) -> tuple[int, ...]:
        return tuple(self._names.index(name) for name in self._layers.stage_starts)

    @cached_property
    def priced_now(self) -> PipelineSpec:
        """The job's own cut at the same prices as the others."""
        return self._priced(self._unpriced(self.now))

    def moves(self) -> Iterator[LayerMove]:
        """The job's cut with one layer moved over one border, the best estimate first."""
        estimates = []
        for stage_starts in neighbour_cuts(self.now, len(self._names)):
            border = next(at for at, (a, b) in enumerate(zip(stage_starts, self.now, strict=True)) if a != b)
            if abs(stage_starts[border] - self.now[border]) == 1:
                estimates.append((self._estimate(stage_starts), border, stage_starts))
        for estimated_s, border, stage_starts in sorted(estimates):
            if estimated_s < float("inf"):
                back = stage_starts[border] < self.now[border]
                layer = self._names[min(stage_starts[border], self.now[border])]
                before, after = self._spec.stages[border - 1].name, self._spec.stages[border].name
                source, target = (before, after) if back else (after, before)
                priced = self._priced(self._unpriced(stage_starts))
                yield LayerMove(layer, source, target, priced, self._named(stage_starts))

    def best(self, expired: Callable[[], bool]) -> tuple[PipelineSpec, tuple[str, ...]] | None:
        """The best cut that borders moved one by one reach; None where that is the job's own."""
        best = min((self.now, balanced_cut(self._profile, len(self.now))), key=self._estimate)
        while not expired() and len(self._estimates) < _MAX_ESTIMATED_CUTS:
            near = min(neighbour_cuts(best, len(self._names)), key=self._estimate, default=best)
            if self._estimate(near) >= self._estimate(best) * (1 - 1e-9):
                break
            best = near
        if best == self.now or self._estimate(best) == float("inf"):
            return None
        return self._priced(self._unpriced(best)), self._named(best)

    def _named(self, stage_starts: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(self._names[index] for index in stage_starts)

    def _estimate(self, stage_starts: tuple[int, ...]) -> float:
        if stage_starts not in self._estimates:
            try:
                self._estimates[stage_starts] = constructive_makespan(
                    self._priced(self._unpriced(stage_starts))
                )
            except (SpecError, CutError):
                self._estimates[stage_starts] = float("inf")
        return self._estimates[stage_starts]

    def _unpriced(self, stage_starts: tuple[int, ...]) -> PipelineSpec:
        spec = self._spec
        numbers = {mesh.name: number for number, mesh in enumerate(spec.meshes)}
        cut = partition(
            self._profile,
            PipelineSetup(
                spec.meshes,
                spec.network,
                schedule=spec.schedule,
                overlap=spec.overlap,
                split_backward=spec.split_backward,
                max_in_flight=spec.max_in_flight,
                recompute=self._layers.recompute,
                optimizer=self._layers.optimizer,
                action_s=self._layers.action_s,
            ),
            stages=len(spec.stages),
            microbatches=spec.microbatches,
            cut=self._named(stage_starts),
            placement=[numbers[stage.mesh] for stage in spec.stages],
        ).spec
        running = (
            (stage.name, recompute_method(dict(stage.recompute)))
            for stage in spec.stages
            if stage.recompute is not None
        )
        return with_recompute_methods(cut, running)

    @cached_property
    def _factors(self) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
        """Measured over profiled seconds, by mesh and by link."""
        now = self._unpriced(self.now)
        profiled = task_seconds(now, self._step, self._recomputed)
        on_paper = compute_s_by_mesh(self._step, profiled)
        meshes = total_times_by(self._step, lambda task: task.mesh if task.target is None else None)
        links = total_times_by(self._step, lambda task: task.link)
        return (
            {name: found.measured_s / on_paper[name] for name, found in meshes.items() if on_paper[name] > 0},
            {link: found.ratio for link, found in links.items()},
        )

    def _priced(self, spec: PipelineSpec) -> PipelineSpec:
        meshes, links = self._factors
        return scale_links(scale_meshes(spec, meshes, host_delays(self._step)), links)


def compute_s_by_mesh(step: StepGraph, seconds: Sequence[float]) -> dict[str, float]:
    """Seconds of compute actions by mesh."""
    found: dict[str, float] = {}
    for task, lasts_s in zip(step.tasks, seconds, strict=True):
        if task.target is None:
            found[task.mesh] = found.get(task.mesh, 0.0) + lasts_s
    return found


def with_microbatches(
    spec: PipelineSpec, count: int, layers: JobLayers, fixed_s: Mapping[str, float]
) -> PipelineSpec:
    """The measured spec with the batch in `count` microbatches.

    By the layers' profiles at both numbers where they are known; else the seconds of an action besides its layers
    (`fixed_s` by mesh) stay, and the rest shrinks as the microbatch does.
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


_MIN_GAIN_SHARE = 0.005
"""The smallest gain, as a share of a step, that a change is listed for."""
_MAX_LINK_PAIRS = 6  # pairs of meshes whose links are tried alone
_MAX_MICROBATCH_COUNTS = 3  # other numbers of microbatches
_MAX_LAYER_MOVES = 2  # single layers


@dataclass(frozen=True)
class TriedChanges:
    """The changes by descending gain; the kinds in `left_out` were not tried for want of time."""

    changes: tuple[Change, ...]
    left_out: tuple[str, ...]


def find_changes(
    step: StepGraph,
    spec: PipelineSpec,
    layers: JobLayers,
    *,
    recomputed: Sequence[str],
    step_s: float,
    expired: Callable[[], bool],
) -> TriedChanges:
    """Changes that make a step of `step_s` seconds shorter, and their gains.

    Cheap predictions are made first, until `expired`.
    """
    trial = _ChangeSearch(step, spec, layers, recomputed, step_s)
    found: list[Change] = []
    left: list[str] = []
    for kind, tried in (
        (ChangeKind.PLAN, trial.plan),
        (ChangeKind.MESH, trial.meshes),
        (ChangeKind.HOST, trial.hosts),
        (ChangeKind.LINK, trial.links),
        (ChangeKind.MEMORY, trial.memory),
        (ChangeKind.MICROBATCHES, trial.microbatches),
        (ChangeKind.LAYER, trial.layers),
        (ChangeKind.CUT, lambda: trial.cuts(expired)),
    ):
        if expired():
            left.append(kind.value)
            continue
        found += (change for change in tried() if change.alone_s >= _MIN_GAIN_SHARE * step_s)
    return TriedChanges(tuple(sorted(found, key=lambda change: -change.gain_s)), tuple(left))


class _ChangeSearch:
    def __init__(
        self, step: StepGraph, spec: PipelineSpec, layers: JobLayers, recomputed: Sequence[str], step_s: float
    ) -> None:
        self._step, self._planned, self._layers, self._recomputed = step, spec, layers, tuple(recomputed)
        self._step_s = step_s
        self._spec = measured_spec(spec, step)
        self._played_s = self._played(self._spec)

    @cached_property
    def _replanned_s(self) -> float:
        return self._quick(self._spec)

    @cached_property
    def _now_s(self) -> float:
        """The baseline of the other changes, whose gain is not that of planning again."""
        return min(self._played_s, self._replanned_s)

    def plan(self) -> Iterator[Change]:
        """The same pipeline, its schedule found again."""
        yield self._change(
            ChangeKind.PLAN,
            "schedule",
            self._played_s - self._replanned_s,
            "the same stages on the same meshes, planned again with the costs that were measured, as a new "
            "attempt does",
        )

    def meshes(self) -> Iterator[Change]:
        """Every mesh that is slower than others, at their speed."""
        ratios = {
            mesh: found.ratio
            for mesh, found in total_times_by(
                self._step, lambda t: t.mesh if t.target is None else None
            ).items()
        }
        for mesh, ratio in ratios.items():
            others = median_ratio(other for name, other in ratios.items() if name != mesh)
            if ratio <= others:
                continue
            faster = scale_meshes(self._spec, {mesh: others / ratio}, {})
            yield self._change(
                ChangeKind.MESH,
                mesh,
                self._gain(faster),
                f"mesh {mesh} as fast beside its plan as the others: another accelerator or node for it",
            )

    def hosts(self) -> Iterator[Change]:
        """All hosts at once."""
        quicker = measured_spec(self._planned, self._step, hosts=False)
        late_s = host_delays(self._step)
        late = max(late_s, key=lambda mesh: late_s[mesh], default="")
        yield self._change(
            ChangeKind.HOST,
            "all meshes",
            self._gain(quicker),
            "actions that begin as soon as all that they need is there: a processor core for each worker, nothing "
            f"else on its node (mesh {late} waits longest, {duration_text(late_s.get(late, 0.0))} an action)",
        )

    def links(self) -> Iterator[Change]:
        """Each pair of meshes twice as fast, or as fast as planned beside the others where that is more; and all."""
        links = total_times_by(self._step, lambda task: task.link)
        factor: dict[Link, float] = {}
        for link, found in links.items():
            others = median_ratio(o.ratio for other, o in links.items() if set(other) != set(link))
            factor[link] = min(0.5, others / max(found.ratio, 1e-12))
        pairs = {tuple(sorted(link)) for link in links}
        tried = []
        for pair in pairs:
            by = {link: factor[link] for link in (pair, pair[::-1]) if link in factor}
            tried.append((self._played(scale_links(self._spec, by)), pair, by))
        for _, pair, by in sorted(tried, key=lambda trial: trial[:2])[:_MAX_LINK_PAIRS]:
            much = max(1 / value for value in by.values())
            yield self._change(
                ChangeKind.LINK,
                f"{pair[0]} - {pair[1]}",
                self._gain(scale_links(self._spec, by)),
                f"links between {pair[0]} and {pair[1]} that are {much:.1f} times as fast"
                + ("" if much <= 2.01 else ", which is as planned"),
            )
        if len(pairs) > 1:
            yield self._change(
                ChangeKind.NETWORK,
                "all links",
                self._gain(scale_links(self._spec, dict.fromkeys(links, 0.5))),
                "a network twice as fast between all meshes",
            )

    def memory(self) -> Iterator[Change]:
        """Every mesh with a limit without it, and all of them."""
        limited = [mesh.name for mesh in self._spec.meshes if _is_limited(mesh)]
        alone = [(mesh,) for mesh in limited] if len(limited) > 1 else []
        for meshes in [tuple(limited), *alone] if limited else []:
            roomy = _without_limits(self._spec, meshes)
            gain_s = self._now_s - self._quick(roomy)
            limits_text = ", ".join(meshes)
            if len(limited) == len(meshes) and gain_s >= _MIN_GAIN_SHARE * self._step_s:
                limits_text = _memory_needs(roomy, self._spec)
            yield self._change(
                ChangeKind.MEMORY,
                "all meshes" if len(meshes) > 1 else meshes[0],
                gain_s,
                "more memory, for what it allows (more microbatches in flight, more tensors waiting, less computed "
                f"again): {limits_text}",
            )

    def microbatches(self) -> Iterator[Change]:
        """The next numbers above, and the next below."""
        now = self._spec.microbatches
        more = sorted(count for count in self._layers.counts if count > now)[: _MAX_MICROBATCH_COUNTS - 1]
        fewer = sorted(count for count in self._layers.counts if count < now)[-1:]
        late_s = host_delays(self._step)
        fixed_s = {mesh: late + self._layers.action_s for mesh, late in late_s.items()}
        for count in [*more, *fewer]:
            known = count in self._layers.profiles and now in self._layers.profiles
            how = "as its layers were measured" if known else "if actions shrink as their microbatches do"
            yield self._change(
                ChangeKind.MICROBATCHES,
                str(count),
                self._now_s - self._quick(with_microbatches(self._spec, count, self._layers, fixed_s)),
                f"training.microbatches {count} instead of {now}, {how}",
            )

    def layers(self) -> Iterator[Change]:
        """One layer over a border."""
        if self._cuts is None:
            return
        for _, move in zip(range(_MAX_LAYER_MOVES), self._cuts.moves(), strict=False):
            yield self._change(
                ChangeKind.LAYER,
                move.layer,
                self._cut_now_s - self._quick(move.spec),
                f"{move.layer} in stage {move.target} instead of {move.source}: "
                f"pipeline.cut [{', '.join(move.stage_starts)}]",
            )

    def cuts(self, expired: Callable[[], bool]) -> Iterator[Change]:
        """The best cut that is found quickly."""
        if self._cuts is None or (found := self._cuts.best(expired)) is None:
            return
        spec, stage_starts = found
        yield self._change(
            ChangeKind.CUT,
            ", ".join(stage_starts),
            self._cut_now_s - self._quick(spec),
            f"stages that begin elsewhere: pipeline.cut [{', '.join(stage_starts)}]",
        )

    @cached_property
    def _cuts(self) -> CutSearch | None:
        return CutSearch.of(self._planned, self._step, self._layers, self._recomputed)

    @cached_property
    def _cut_now_s(self) -> float:
        """The job's own cut, priced as the others are."""
        assert self._cuts is not None
        return min(self._played(self._cuts.priced_now), self._quick(self._cuts.priced_now))

    def _change(self, kind: ChangeKind, subject: str, gain_s: float, message: str) -> Change:
        """`gain_s` is beside the step planned anew, which every change that needs a new attempt brings as well."""
        anew_s = 0.0 if kind is ChangeKind.PLAN else self._played_s - self._now_s
        whole_s = min(max(0.0, gain_s) + anew_s, self._step_s)
        return Change(kind, subject, whole_s, whole_s - anew_s, self._step_s - whole_s, message)

    def _gain(self, spec: PipelineSpec) -> float:
        """The gain of the same stages and meshes at other costs."""
        return self._now_s - min(self._played(spec), self._quick(spec))

    def _played(self, spec: PipelineSpec) -> float:
        """The programs as they ran, at the costs of `spec`."""
        return self._step.replay(task_seconds(spec, self._step, self._recomputed))

    def _quick(self, spec: PipelineSpec) -> float:
        """The makespan of the best constructive plan in which the stages recompute that do now, none, or all that may;
        infinite where nothing fits."""
        choices = {frozenset(self._recomputed), frozenset[str](), frozenset(may_recompute(spec))}
        return min(_constructive_makespan(with_recomputation(spec, choice)) for choice in choices)


def _constructive_makespan(spec: PipelineSpec) -> float:
    try:
        check_spec(spec)
        if spec.schedule == AUTO:
            return constructive_makespan(spec)
        return named_timeline(spec, spec.schedule).makespan
    except SpecError:
        return float("inf")


def best_change_of_kinds(
    changes: Sequence[Change], kinds: Mapping[ChangeKind, object], *, step_s: float
) -> list[Change]:
    """The change of each kind that gains most, where that is a clear part of the step."""
    found: dict[ChangeKind, Change] = {}
    for change in changes:
        if change.kind in kinds and change.alone_s >= MIN_COST_SHARE * step_s:
            found.setdefault(change.kind, change)
    return list(found.values())


def _is_limited(mesh: MeshSpec) -> bool:
    limits = (mesh.memory_bytes, mesh.activation_limit_bytes, mesh.receive_buffer_limit)
    return any(limit is not None for limit in limits)


def _without_limits(spec: PipelineSpec, meshes: Collection[str]) -> PipelineSpec:
    none = dict.fromkeys(("memory_bytes", "activation_limit_bytes", "receive_buffer_limit"))
    found = [mesh.model_copy(update=none) if mesh.name in meshes else mesh for mesh in spec.meshes]
    return spec.model_copy(update={"meshes": found})


def _memory_needs(roomy: PipelineSpec, limited: PipelineSpec) -> str:
    """The bytes that meshes would hold in a plan without limits; only the name of a mesh that stays within its limit."""
    try:
        peaks = peak_memory(find_timeline(roomy, budget_s=0.0))
    except SpecError:
        peaks = [0] * len(limited.meshes)
    parts = []
    for mesh, peak in zip(limited.meshes, peaks, strict=True):
        limit = mesh.memory_bytes
        more = limit is not None and peak > limit
        parts.append(f"{mesh.name} would hold {int(peak)} bytes, {limit} is its limit" if more else mesh.name)
    return ", ".join(parts)
