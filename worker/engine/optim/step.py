"""REDUCE and STEP of one mesh: sums gradients over tied parameters and dp ranks, clips by norm and updates.

Owns the parameters, the optimizer, the learning-rate schedule and their state, all by names in the unsplit
model. Counts with each sum how many ranks made a gradient: a parameter for which none did keeps none, so
neither decay nor momentum moves it. The norm is NaN where a loss is not finite, so that every mesh sees that; a
step that is not finite leaves parameters and optimizer as they are. On CUDA the host does not wait if the
optimizer honours found_inf. Must not know programs, lanes or microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from worker.contract.buckets import Gradient
from worker.engine.forward import drop_casts
from worker.engine.lanes.base import Finish, chain_finish
from worker.engine.optim.grad_scaler import PipelineGradScaler, group_by_dtype
from worker.engine.optim.state_dict import load_groups, load_schedule, save_groups
from worker.engine.results import NonFiniteError, RunOptions
from worker.parallel.process_groups import PP_GROUP, WORLD, dp_group, reduce_groups, tp_group
from worker.parallel.tensor.shards import TensorParallelShards
from worker.transport.base import Transport, finish


def tie_local_parameters(stages: Mapping[int, nn.Module], tied: Mapping[str, Sequence[int]]) -> None:
    """Make a parameter that several stages of this mesh use one object, as in the unsplit model."""
    for name, holders in tied.items():
        first: nn.Parameter | None = None
        for stage in holders:
            if stage not in stages:
                continue
            module = stages[stage]
            for local, original in _original_names(module).items():
                if original != name:
                    continue
                owner, _, attribute = local.rpartition(".")
                holder = module.get_submodule(owner)
                if first is None:
                    first = holder._parameters[attribute]
                else:
                    holder._parameters[attribute] = first


def named_parameters(stages: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of some stages, each once, by original name."""
    found: dict[str, nn.Parameter] = {}
    for stage in sorted(stages):
        names = _original_names(stages[stage])
        for local, parameter in stages[stage].named_parameters():
            found.setdefault(names.get(local, f"stage{stage}.{local}"), parameter)
    return found


def named_buffers(stages: Mapping[int, nn.Module]) -> dict[str, torch.Tensor]:
    """The buffers of some stages. A buffer without an original name is a constant of its stage and no state."""
    found: dict[str, torch.Tensor] = {}
    for stage in sorted(stages):
        names = _original_names(stages[stage])
        for local, buffer in stages[stage].named_buffers():
            if local in names:
                found.setdefault(names[local], buffer)
    return found


def _original_names(module: nn.Module) -> Mapping[str, str]:
    return getattr(module, "original_names", {})


@dataclass(frozen=True)
class UpdateSettings:
    """`non_finite`: "stop" raises, "skip" leaves parameters and optimizer as they are; norm and flags lie on
    `device`, also where the mesh has no parameter to tell it. The workers of the meshes `sharded` share the
    optimizer's state (sharded_update.py); `tensor` is that of RunOptions."""

    clip_grad_norm: float | None
    non_finite: str
    device: torch.device | str = "cpu"
    sharded: tuple[str, ...] = ()
    tensor: int = 1

    @classmethod
    def of(cls, options: RunOptions, device: torch.device) -> UpdateSettings:
        """Those of a mesh that runs by `options`."""
        return cls(options.clip_grad_norm, options.non_finite, device, tuple(options.sharded), options.tensor)


@dataclass
class UpdateResult:
    """What a step's REDUCE and STEP found; `loss_scale` is that of the step, where there is one, and `overflowed` says
    that it was too large."""

    grad_norm: float | None = None
    skipped: bool = False
    loss_scale: float | None = None
    overflowed: bool = False


class ModelUpdate:
    """The parameters of the stages of one mesh, each once, by original name."""

    def __init__(
        self,
        *,
        stages: Mapping[int, nn.Module],
        tied: Mapping[str, Sequence[int]],
        mesh_of_stage: Sequence[str],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None,
        lr_schedule: Callable[[torch.optim.Optimizer], Any] | None,
        transport: Transport,
        settings: UpdateSettings,
        scaler: PipelineGradScaler | None = None,
        share: TensorParallelShards | None = None,
    ):
        self.transport = transport
        self.scaler = scaler
        self._share = share
        self._settings = settings
        self._stages = stages
        self.parameters = named_parameters(stages)
        self._buffers = named_buffers(stages)
        mesh, worker = transport.mesh, transport.worker
        self._groups = reduce_groups(
            transport.topology, tied, mesh_of_stage, bool(settings.sharded), settings.tensor
        )
        self._dp_group = dp_group(mesh, worker, settings.tensor)
        self.tp_group = tp_group(mesh, worker, settings.tensor)
        self._uniform = transport.topology.uniform
        self._asks_all = not self._uniform or bool(settings.sharded)
        self._meshes_group = WORLD if self._asks_all else f"{PP_GROUP}/{worker}"
        self._names = {parameter: name for name, parameter in self.parameters.items()}
        self._tied_groups = {
            name: group
            for name in sorted(tied)
            if name in self.parameters
            and (group := f"tied/{name}/{worker}" if self._uniform else f"tied/{name}") in self._groups
        }
        # Every worker that has the loss makes gradients of the mean over its own rows: the sum over all workers of a
        # mesh, each with its rows, is as many times too large, however many workers this mesh has.
        last = mesh_of_stage[-1]
        self._dp_size_of_loss = transport.topology.workers(last) // transport.topology.tensor(
            last, settings.tensor
        )
        owner = {
            name: min(stages, key=lambda s: transport.topology.meshes.index(mesh_of_stage[s]))
            for name, stages in tied.items()
        }
        self._counted = [
            name for name in self.parameters if name not in owner or mesh_of_stage[owner[name]] == mesh
        ]
        # What the optimizer updates, by name: other tensors where the workers share its state.
        self.updated: Mapping[str, nn.Parameter] = self.parameters
        trainable = [p for p in self.parameters.values() if p.requires_grad]
        self.optimizer = optimizer(trainable) if optimizer is not None and trainable else None
        self.lr_schedule = lr_schedule(self.optimizer) if lr_schedule and self.optimizer else None
        self._norm: torch.Tensor | None = None
        self._bucketed: frozenset[str] = frozenset()
        # Of parameters without a gradient of this worker: how many others made one.
        self._gradient_counts: dict[nn.Parameter, torch.Tensor] = {}
        self.in_dry_run = False

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """What the transport must be able to all-reduce over."""
        return self._groups

    def begin(self) -> None:
        """Forget the gradients of the last step."""
        self._norm = None
        self._gradient_counts = {}
        drop_casts()
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def reduce(self, losses: Sequence[torch.Tensor]) -> None:
        """REDUCE: afterwards every `.grad` is that of the unsplit model over the whole global batch."""
        for name, group in self._tied_groups.items():
            parameter = self.parameters[name]
            if parameter.requires_grad:
                self._sum_tied(parameter, group)
        late = [
            p
            for name, p in self.parameters.items()
            if name not in self._bucketed
            and p.requires_grad
            and (self._uniform or name not in self._tied_groups)
        ]
        if self._dp_group in self._groups:
            for parameters in group_by_dtype(late).values():
                finish(self._average(parameters))
        elif self._dp_size_of_loss > 1:
            for parameter in late:
                if parameter.grad is not None:
                    parameter.grad /= self._dp_size_of_loss
        if self.scaler is not None:
            self.scaler.unscale(p.grad for p in self.parameters.values() if p.grad is not None)
        self._norm = self._global_norm(losses)
        if self.in_dry_run:  # of zeros it may be no number, and STEP would do nothing
            self._norm = torch.ones_like(self._norm)

    def gradients(self) -> list[Gradient]:
        """What the workers of this mesh can sum as soon as its last backward has ended: not what is summed over
        meshes first."""
        if self._dp_group not in self._groups:
            return []
        name_of = {id(parameter): name for name, parameter in self.parameters.items()}
        stages: dict[str, list[int]] = {}
        for stage, module in self._stages.items():
            for parameter in module.parameters():
                stages.setdefault(name_of[id(parameter)], []).append(stage)
        return [
            Gradient(name, tuple(stages[name]), p.numel() * p.element_size(), str(p.dtype))
            for name, p in self.parameters.items()
            if p.requires_grad and name not in self._tied_groups
        ]

    def set_bucketed(self, names: Iterable[str]) -> None:
        """These are summed by `reduce_bucket`, before `reduce`."""
        self._bucketed = frozenset(names)

    @torch.no_grad()
    def reduce_bucket(self, names: Sequence[str]) -> Finish | None:
        """REDUCE of a bucket: start to average its gradients over the workers of the mesh."""
        return self._average([self.parameters[name] for name in names])

    @torch.no_grad()
    def step(self) -> None:
        """STEP: clip and update; leave everything as it is when a loss or the norm is not finite.

        On CUDA the host does not wait if the optimizer can skip by itself.
        """
        drop_casts()
        norm = self._norm
        if not self.parameters:
            return
        for parameter, makers in self._gradient_counts.items():
            if (
                float(makers) == 0
            ):  # as in the plain loop it has none, and neither decay nor momentum moves it
                parameter.grad = None
        if norm.is_cuda and honours_found_inf(self.optimizer):
            self.optimizer.found_inf = (~torch.isfinite(norm)).float()
        elif not math.isfinite(float(norm)):
            return
        gradients = [p.grad for p in self.updated.values() if p.grad is not None]
        limit = self._settings.clip_grad_norm
        if limit is not None and gradients:
            coefficient = torch.clamp(limit / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(gradients, coefficient.to(gradients[0].dtype))
        if self.optimizer is not None:
            with torch.enable_grad():
                self.optimizer.step()

    def gather(self) -> None:
        """STEP, behind `step`: get what other workers have updated, where they share the optimizer's state."""

    def finish(self, step: int) -> UpdateResult:
        """After the step's last action: what it found. NonFiniteError when the policy is to stop."""
        if self._norm is None:
            return UpdateResult()
        value = float(self._norm)
        scale, overflowed = (None, False) if self.scaler is None else self.scaler.ended(step)
        if not math.isfinite(value):
            if self._settings.non_finite == "stop" and not overflowed:
                raise NonFiniteError(
                    f"step {step}: the loss or the gradient norm is not finite (norm {value}): "
                    "lower the learning rate, or check the data"
                )
            return UpdateResult(value, True, scale, overflowed)
        if self.lr_schedule is not None:
            self.lr_schedule.step()
        return UpdateResult(value, loss_scale=scale)

    def state(self) -> dict[str, Any]:
        """Parameters, buffers and optimizer state by original name. Where workers share matrices these are whole, and
        all of them call this at the same time."""
        own = self._own_state()
        return own if self._share is None else self._share.whole_state(own)

    def _own_state(self) -> dict[str, Any]:
        """Of matrices that several workers share, this one's parts."""
        names = self._optimized_names()
        saved = (
            self.optimizer.state_dict() if self.optimizer is not None else {"state": {}, "param_groups": []}
        )
        return {
            "parameters": {name: p.detach() for name, p in self.parameters.items()},
            "buffers": dict(self._buffers),
            "optimizer": {names[index]: entry for index, entry in saved["state"].items()},
            "optimizer_groups": []
            if self.optimizer is None
            else save_groups(self.optimizer, self._name_of(), self.lr_schedule),
            "lr_schedule": None if self.lr_schedule is None else self.lr_schedule.state_dict(),
            "loss_scale": None if self.scaler is None else self.scaler.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`; `state` may hold other meshes' entries too. KeyError names what is missing."""
        self._load_own(state if self._share is None else self._share.part_of_state(state, {*self.parameters}))

    @torch.no_grad()
    def _load_own(self, state: Mapping[str, Any]) -> None:
        """Inverse of `_own_state`."""
        for kind, mine in (("parameters", self.parameters), ("buffers", self._buffers)):
            for name, tensor in mine.items():
                if name not in state[kind]:
                    raise KeyError(f"the state has no {kind[:-1]} {name!r}")
                tensor.copy_(state[kind][name])
        if self.scaler is not None and state.get("loss_scale"):
            self.scaler.load_state(state["loss_scale"])
        if self.optimizer is None:
            return
        taken = load_groups(self.optimizer, self._name_of(), state.get("optimizer_groups") or [])
        names = enumerate(self._optimized_names())
        entries = {i: state["optimizer"][name] for i, name in names if name in state["optimizer"]}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": entries, "param_groups": groups})
        if self.lr_schedule is not None and state.get("lr_schedule"):
            load_schedule(self.lr_schedule, state["lr_schedule"], taken)

    def _optimized_names(self) -> list[str]:
        """Original names in the order in which the optimizer numbers its parameters."""
        if self.optimizer is None:
            return []
        name_of = self._name_of()
        return [name_of(p) for group in self.optimizer.param_groups for p in group["params"]]

    def _name_of(self) -> Callable[[torch.Tensor], str]:
        names = {id(parameter): name for name, parameter in self.updated.items()}
        return lambda parameter: names[id(parameter)]

    def _sum_tied(self, parameter: nn.Parameter, group: str) -> None:
        """Sum over the meshes that hold it, and count which of them made a gradient."""
        made = parameter.grad is not None
        makers = torch.full((), float(made), device=parameter.device)
        gradient = _grad_or_zeros(parameter)
        if self._uniform or self._share is None:
            self.transport.all_reduce(group, gradient)
        else:  # other meshes hold other parts of it, or the whole
            self._share.sum_whole(
                self._names[parameter], gradient, lambda whole: self.transport.all_reduce(group, whole)
            )
        self.transport.all_reduce(group, makers)
        if not self._uniform:
            parameter.grad /= (
                self._dp_size_of_loss
            )  # over all workers of all meshes: nothing is left to be summed
        if not made:
            self._gradient_counts[parameter] = makers

    def _average(self, parameters: Sequence[nn.Parameter]) -> Finish | None:
        """Start to average over the workers of the mesh, and to count which of them made a gradient."""
        unmade = [k for k, p in enumerate(parameters) if p.grad is None or p in self._gradient_counts]
        gradients = [_grad_or_zeros(p) for p in parameters]
        counts = gradients[0].new_ones(len(gradients))
        for k in unmade:
            counts[k] = self._gradient_counts.get(parameters[k], 0.0)
        flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), counts])

        @torch.no_grad()
        def hand_out() -> None:
            *parts, makers = flat.split([*(g.numel() for g in gradients), len(gradients)])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient) / self._dp_size_of_loss)
            for k in unmade:
                self._gradient_counts[parameters[k]] = makers[k].clone()

        return chain_finish(self.transport.start_all_reduce(self._dp_group, flat), hand_out)

    def _global_norm(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm over all meshes; NaN when a loss is not finite, so that every mesh sees that."""
        gradients = self._gradients_of_norm()
        if self._share is not None:
            self._share.agree({name: one.grad for name, one in self.updated.items() if one.grad is not None})
        dtype = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
        # One dtype on every mesh, whatever its parameters: float64 on CPU, where it costs nothing.
        total = torch.zeros((), dtype=torch.float64, device=self._settings.device)
        if gradients:
            norms = torch._foreach_norm(gradients, 2, dtype=dtype)
            total += torch.stack(norms).double().square().sum()
        if self._share is not None and not self._asks_all:  # else all workers add up theirs below
            self._share.sum(total)
            if self.scaler is not None:
                self._share.sum(self.scaler.found_inf)
        if losses:
            finite = torch.stack(list(losses)).double().sum() * 0.0
            if self._dp_group in self._groups and not self._asks_all:
                self.transport.all_reduce(self._dp_group, finite)
            total += finite
        sums = total if self.scaler is None else torch.stack([total, self.scaler.found_inf])
        if self._meshes_group in self._groups:
            self.transport.all_reduce(self._meshes_group, sums)
        if self.scaler is not None:
            total, self.scaler.found_inf = sums.unbind()
        return total.sqrt()

    def _gradients_of_norm(self) -> list[torch.Tensor]:
        """Where all workers add to the norm those of a mesh, which have the same, add theirs once."""
        if self._asks_all and self.transport.worker >= self._settings.tensor:
            return []
        return [g for name in self._counted_here() if (g := self.parameters[name].grad) is not None]

    def _counted_here(self) -> Sequence[str]:
        """The parameters of which this worker counts what it has, where those that share matrices add up theirs."""
        return self._counted if self._share is None else self._share.counted(self._counted)


def honours_found_inf(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether a step with `found_inf` set leaves everything as it is: fused kernels do, but a first step of SGD
    with momentum makes its buffers there, and skipped they would stay undefined."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return bool(optimizer.state) or not any(group.get("momentum") for group in optimizer.param_groups)


def _grad_or_zeros(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
