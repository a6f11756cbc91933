"""Exports a model in eval mode and cuts it where the trained one is cut, sharing the parameters that train.

Dropout and running statistics are fixed when a model is traced, so trained stages cannot be evaluated: these
stages have graphs of their own. Buffers that an evaluation changes stay its own. Must not know engines, data or
jobs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from worker.contract.profile import CutError, TraceError, resolve_stage_starts
from worker.model.export import TracedModel, trace
from worker.model.pytree import TreeSpec
from worker.model.stages import StageEdge, StageModule, trained_tensors


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode in the body; each of its modules is afterwards in the mode in which it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def trace_in_eval_mode(
    model: nn.Module,
    example_inputs: tuple[Tensor, ...],
    *,
    autocast: torch.dtype | None,
    device: str = "cpu",
    transfers: str,
    opaque: Mapping[str, str] | None = None,
    whole: bool = False,
) -> TracedModel:
    """`trace` of the model in eval mode; each of its modules is afterwards in the mode in which it was."""
    try:
        with in_eval_mode(model):
            return trace(
                model,
                example_inputs,
                autocast=autocast,
                device=device,
                transfers=transfers,
                opaque=opaque,
                whole=whole,
            )
    except TraceError as error:
        raise TraceError(f"in eval mode, which `evaluation` needs: {error}") from error


@dataclass(frozen=True)
class EvaluationEdge:
    """A tensor that one stage makes and another uses while they are evaluated, and its bytes on the wire.

    `shapes` are those of each worker's part by how many workers share a microbatch, as far as the meshes need them.
    """

    source: int
    target: int
    tensor: str
    bytes: int
    shapes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def bytes_of(self, workers: int) -> int:
        """Bytes of the tensor on each of `workers` data-parallel ranks; `bytes` where no shape is known for this number."""
        if workers not in self.shapes:
            return self.bytes
        return math.prod(self.shapes[workers]) * self.element_bytes

    @property
    def element_bytes(self) -> int:
        """`shapes` begins with the shape that `bytes` are of."""
        return self.bytes // max(1, math.prod(next(iter(self.shapes.values()))))


@dataclass
class EvaluationStages:
    """The stages of one mesh, and of the whole graph what connects them.

    `own` are buffers that are no trained stage's (module, name, the trained stage's buffer): an evaluation begins with
    what that holds, and leaves it alone. `alone` are those that a checkpoint holds and that training does not use, by
    their names in the model. `tree_spec` is that of what the evaluated model returns.
    """

    stages: dict[int, StageModule]
    edges: tuple[StageEdge, ...]
    tied: dict[str, tuple[int, ...]]
    own: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)
    alone: dict[str, Tensor] = field(default_factory=dict)
    tree_spec: TreeSpec | None = None

    @torch.no_grad()
    def begin(self) -> list[Tensor]:
        """Take what the trained stages hold now; the buffers that hold it."""
        for module, name, trained in self.own:
            module._buffers[name].copy_(trained)
        return [module._buffers[name] for module, name, _ in self.own]


def evaluation_stage_starts(
    trained: Sequence[str], stage_starts: Sequence[str], evaluated: Sequence[str]
) -> list[str]:
    """The layers of the evaluated model that begin the stages of a cut of the trained one.

    A layer that does nothing in eval mode (stochastic depth, say) is not there: the next one begins its stage. Raises
    CutError for a stage of which nothing is left.
    """
    known, found = set(evaluated), [evaluated[0]]
    for stage, name in enumerate(resolve_stage_starts(trained, stage_starts)[1:], start=1):
        left = (layer for layer in trained[trained.index(name) :] if layer in known)
        first = next(left, None)
        if first is None or evaluated.index(first) <= evaluated.index(found[-1]):
            raise CutError(
                f"stage {stage}, which begins at {name!r}, does nothing of its own in eval mode: `evaluation` needs "
                "another pipeline.cut, or fewer stages"
            )
        found.append(first)
    return found


def evaluation_edges(
    models: Mapping[int, TracedModel], stage_starts: Mapping[int, Sequence[str]]
) -> list[EvaluationEdge]:
    """The edges of a cut, in the order in which programs count them; `models` by how many workers share a microbatch,
    this worker's own first."""
    found = [
        model.builder(_start_indices(model, stage_starts[size])).edges() for size, model in models.items()
    ]
    names = [[(edge.source, edge.target, edge.tensor) for edge in edges] for edges in found]
    if any(other != names[0] for other in names):
        raise CutError(
            "in eval mode the model passes on other tensors with the rows of one mesh than with those of another: does it "
            "ask how many rows there are? Give all meshes the same number of workers"
        )
    return [
        EvaluationEdge(
            edge.source,
            edge.target,
            edge.tensor,
            edge.bytes,
            {size: one.shape for size, one in zip(models, same, strict=True)},
        )
        for edge, same in zip(found[0], zip(*found, strict=True), strict=True)
    ]


def evaluation_stages(
    traced: TracedModel,
    stage_starts: Sequence[str],
    trained: Mapping[int, StageModule],
    *,
    device: str,
    own_statistics: bool,
    share: Callable[[StageModule], StageModule] = lambda stage: stage,
) -> EvaluationStages:
    """The stages of a cut that a mesh runs, which has `trained`; their parameters and buffers are those of `trained`.

    Buffers that an evaluation changes are its own, and with `own_statistics` those that training changes. `share` makes
    of each stage what uses the parameters as `trained` has them. Raises
    CutError for a parameter that no trained stage of this mesh holds.
    """
    builder = traced.builder(_start_indices(traced, stage_starts))
    found = EvaluationStages({}, builder.edges(), builder.tied(), tree_spec=traced.tree_spec)
    held = trained_tensors(trained.values())
    changed = {s.tensor_names[local] for s in trained.values() for local in s.updated_buffers}
    for index in trained:
        stage = share(builder.stage(index))
        found.own += _tie_to_trained(stage, held, changed if own_statistics else set())
        found.stages[index] = stage.to(device)
        found.alone |= {
            name: stage.get_buffer(local) for local, name in stage.original_names.items() if name not in held
        }
    return found


def _start_indices(traced: TracedModel, stage_starts: Sequence[str]) -> set[int]:
    return {traced.layers.index(name) for name in stage_starts}


def _tie_to_trained(
    stage: StageModule, held: Mapping[str, Tensor], unshared: Collection[str]
) -> list[tuple[nn.Module, str, Tensor]]:
    """Put the trained tensors into `stage`; `unshared` ones, and those that it changes, stay its own: these."""
    own = []
    for local, name in stage.tensor_names.items():
        owner, _, attribute = local.rpartition(".")
        module, trained = stage.get_submodule(owner), held.get(name)
        if attribute in module._parameters:
            if not isinstance(trained, nn.Parameter):
                raise CutError(
                    f"stage {stage.index} uses parameter {name!r} in eval mode, and in training it does not: use it in "
                    "both, or leave out `evaluation`"
                )
            module._parameters[attribute] = trained
        elif trained is not None and (name in unshared or local in stage.updated_buffers):
            own.append((module, attribute, trained))
        elif trained is not None:
            module._buffers[attribute] = trained
    return own
