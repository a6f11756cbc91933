"""What would shorten a step most: every change is planned with the costs that were measured, and what the scheduler
predicts of it is its gain.

Quick plans: the programs as they ran, played again, and the constructive schedules; never the search. So a gain is
what is surely there, and the plan of a new attempt may find more. All is judged with the middle of what the
microbatches took, the same for the step as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from service.scheduler.automatic import constructive_makespan
from service.scheduler.model.memory import peak_memory
from service.scheduler.model.spec import MeshSpec, PipelineSpec, SpecError, check_spec
from service.scheduler.named import named_timeline
from service.scheduler.planner import find_timeline
from service.scheduler.recomputation import may_recompute, with_choice
from service.scheduler.schedules import AUTO
from service.scheduler.why.causes import GUILTY
from service.scheduler.why.cuts import Cuts, Layers, with_microbatches
from service.scheduler.why.measured import (
    host_delays,
    measured_spec,
    slower_links,
    slower_meshes,
    sums,
    task_seconds,
    typical,
)
from service.scheduler.why.step import Link, Step
from service.scheduler.why.values import Change, ChangeKind, milliseconds

_WORTH = 0.005
"""The part of a step that a change brings at least to be told."""
_LINKS = 6  # pairs of meshes whose links are tried alone
_COUNTS = 3  # other numbers of microbatches
_MOVES = 2  # single layers


@dataclass(frozen=True)
class Changes:
    """The most useful first; `left_out` were not tried for want of time."""

    changes: tuple[Change, ...]
    left_out: tuple[str, ...]


def changes_of(
    step: Step,
    spec: PipelineSpec,
    layers: Layers,
    *,
    recomputed: Sequence[str],
    step_s: float,
    expired: Callable[[], bool],
) -> Changes:
    """What would make a step of `step_s` seconds shorter, and by how much.

    Changes are tried from those that cost little thinking to those that cost much, until `expired`.
    """
    trial = _Trial(step, spec, layers, recomputed, step_s)
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
        found += (change for change in tried() if change.alone_s >= _WORTH * step_s)
    return Changes(tuple(sorted(found, key=lambda change: -change.gain_s)), tuple(left))


class _Trial:
    def __init__(
        self, step: Step, spec: PipelineSpec, layers: Layers, recomputed: Sequence[str], step_s: float
    ) -> None:
        self._step, self._planned, self._layers, self._recomputed = step, spec, layers, tuple(recomputed)
        self._step_s = step_s
        self._spec = measured_spec(spec, step)
        self._played_s = self._played(self._spec)

    @cached_property
    def _anew(self) -> float:
        return self._quick(self._spec)

    @cached_property
    def _now_s(self) -> float:
        """What other changes are judged against: their gain is not that of planning anew."""
        return min(self._played_s, self._anew)

    def plan(self) -> Iterator[Change]:
        """The same pipeline, its schedule found again."""
        yield self._change(
            ChangeKind.PLAN,
            "schedule",
            self._played_s - self._anew,
            "the same stages on the same meshes, planned again with the costs that were measured, as a new "
            "attempt does",
        )

    def meshes(self) -> Iterator[Change]:
        """Every mesh that is slower than others, at their speed."""
        ratios = {
            mesh: found.ratio
            for mesh, found in sums(self._step, lambda t: t.mesh if t.target is None else None).items()
        }
        for mesh, ratio in ratios.items():
            others = typical(other for name, other in ratios.items() if name != mesh)
            if ratio <= others:
                continue
            faster = slower_meshes(self._spec, {mesh: others / ratio}, {})
            yield self._change(
                ChangeKind.MESH,
                mesh,
                self._gain(faster),
                f"mesh {mesh} as fast beside its plan as the others: another accelerator or node for it",
            )

    def hosts(self) -> Iterator[Change]:
        """All hosts at once: they are alike."""
        quicker = measured_spec(self._planned, self._step, hosts=False)
        late_s = host_delays(self._step)
        late = max(late_s, key=lambda mesh: late_s[mesh], default="")
        yield self._change(
            ChangeKind.HOST,
            "all meshes",
            self._gain(quicker),
            "actions that begin as soon as all that they need is there: a processor core for each worker, nothing "
            f"else on its node (mesh {late} waits longest, {milliseconds(late_s.get(late, 0.0))} an action)",
        )

    def links(self) -> Iterator[Change]:
        """Each pair of meshes twice as fast, or as fast as planned beside the others where that is more; and all."""
        links = sums(self._step, lambda task: task.link)
        factor: dict[Link, float] = {}
        for link, found in links.items():
            others = typical(o.ratio for other, o in links.items() if set(other) != set(link))
            factor[link] = min(0.5, others / max(found.ratio, 1e-12))
        pairs = {tuple(sorted(link)) for link in links}
        tried = []
        for pair in pairs:
            by = {link: factor[link] for link in (pair, pair[::-1]) if link in factor}
            tried.append((self._played(slower_links(self._spec, by)), pair, by))
        for _, pair, by in sorted(tried, key=lambda one: one[:2])[:_LINKS]:
            much = max(1 / value for value in by.values())
            yield self._change(
                ChangeKind.LINK,
                f"{pair[0]} - {pair[1]}",
                self._gain(slower_links(self._spec, by)),
                f"links between {pair[0]} and {pair[1]} that are {much:.1f} times as fast"
                + ("" if much <= 2.01 else ", which is as planned"),
            )
        if len(pairs) > 1:
            yield self._change(
                ChangeKind.NETWORK,
                "all links",
                self._gain(slower_links(self._spec, dict.fromkeys(links, 0.5))),
                "a network twice as fast between all meshes",
            )

    def memory(self) -> Iterator[Change]:
        """Every mesh with a limit without it, and all of them."""
        limited = [mesh.name for mesh in self._spec.meshes if _limits(mesh)]
        alone = [(mesh,) for mesh in limited] if len(limited) > 1 else []
        for meshes in [tuple(limited), *alone] if limited else []:
            roomy = _without_limits(self._spec, meshes)
            gain_s = self._now_s - self._quick(roomy)
            told = ", ".join(meshes)
            if len(limited) == len(meshes) and gain_s >= _WORTH * self._step_s:
                told = _needs(roomy, self._spec)
            yield self._change(
                ChangeKind.MEMORY,
                "all meshes" if len(meshes) > 1 else meshes[0],
                gain_s,
                "more memory, for what it allows (more microbatches in flight, more tensors waiting, less computed "
                f"again): {told}",
            )

    def microbatches(self) -> Iterator[Change]:
        """The next numbers above, and the next below."""
        now = self._spec.microbatches
        more = sorted(count for count in self._layers.counts if count > now)[: _COUNTS - 1]
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
        for _, move in zip(range(_MOVES), self._cuts.moves(), strict=False):
            yield self._change(
                ChangeKind.LAYER,
                move.layer,
                self._cut_now_s - self._quick(move.spec),
                f"{move.layer} in stage {move.target} instead of {move.source}: pipeline.cut [{', '.join(move.begins)}]",
            )

    def cuts(self, expired: Callable[[], bool]) -> Iterator[Change]:
        """The best cut that is found quickly."""
        if self._cuts is None or (found := self._cuts.best(expired)) is None:
            return
        spec, begins = found
        yield self._change(
            ChangeKind.CUT,
            ", ".join(begins),
            self._cut_now_s - self._quick(spec),
            f"stages that begin elsewhere: pipeline.cut [{', '.join(begins)}]",
        )

    @cached_property
    def _cuts(self) -> Cuts | None:
        return Cuts.of(self._planned, self._step, self._layers, self._recomputed)

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
        """Of the same stages and meshes at other costs."""
        return self._now_s - min(self._played(spec), self._quick(spec))

    def _played(self, spec: PipelineSpec) -> float:
        """The programs as they ran, at the costs of `spec`."""
        return self._step.replay(task_seconds(spec, self._step, self._recomputed))

    def _quick(self, spec: PipelineSpec) -> float:
        """The makespan of the best constructive plan with the stages that recompute now recomputing, none, or all
        that may; infinite where nothing fits."""
        choices = {frozenset(self._recomputed), frozenset[str](), frozenset(may_recompute(spec))}
        return min(_constructive(with_choice(spec, choice)) for choice in choices)


def _constructive(spec: PipelineSpec) -> float:
    try:
        check_spec(spec)
        if spec.schedule == AUTO:
            return constructive_makespan(spec)
        return named_timeline(spec, spec.schedule).makespan
    except SpecError:
        return float("inf")


def guilty(changes: Sequence[Change], kinds: Mapping[ChangeKind, object], *, step_s: float) -> list[Change]:
    """Of each of these kinds the change that brings most, where that is a clear part of the step."""
    found: dict[ChangeKind, Change] = {}
    for change in changes:
        if change.kind in kinds and change.alone_s >= GUILTY * step_s:
            found.setdefault(change.kind, change)
    return list(found.values())


def _limits(mesh: MeshSpec) -> bool:
    limits = (mesh.memory_bytes, mesh.activation_limit_bytes, mesh.receive_buffer_limit)
    return any(limit is not None for limit in limits)


def _without_limits(spec: PipelineSpec, meshes: Collection[str]) -> PipelineSpec:
    none = dict.fromkeys(("memory_bytes", "activation_limit_bytes", "receive_buffer_limit"))
    found = [mesh.model_copy(update=none) if mesh.name in meshes else mesh for mesh in spec.meshes]
    return spec.model_copy(update={"meshes": found})


def _needs(roomy: PipelineSpec, limited: PipelineSpec) -> str:
    """What the meshes would hold in a plan without limits; where that is no more than they may, a name."""
    try:
        peaks = peak_memory(find_timeline(roomy, budget_s=0.0))
    except SpecError:
        peaks = [0] * len(limited.meshes)
    told = []
    for mesh, peak in zip(limited.meshes, peaks, strict=True):
        limit = mesh.memory_bytes
        more = limit is not None and peak > limit
        told.append(f"{mesh.name} would hold {int(peak)} bytes, {limit} is its limit" if more else mesh.name)
    return ", ".join(told)
