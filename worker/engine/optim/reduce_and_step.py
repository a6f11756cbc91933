"""REDUCE and STEP of one mesh: sums gradients over tied parameters and dp ranks, clips by norm and updates.

Owns the parameters, the optimizer, the learning-rate schedule and their state, all by names in the unsplit
model. Counts with each sum how many ranks made a gradient: a parameter for which none did keeps none, so
neither decay nor momentum moves it. The norm is NaN where a loss is not finite, so that every mesh sees that; a
step that is not finite leaves parameters and optimizer as they are. On CUDA the host does not wait if the
optimizer honours found_inf. Must not know programs, lanes or microbatches.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from worker.contract.buckets import Gradient
from worker.engine.forward import drop_casts
from worker.engine.lanes.base import Finish, chain_finish
from worker.engine.local_stages import LocalStages, named_buffers, named_parameters
from worker.engine.optim.cross_sums import complete_sums, sums_over_ranks, zero_parameter
from worker.engine.optim.grad_scaler import PipelineGradScaler, group_by_dtype
from worker.engine.optim.state_dict import class_name, load_groups, load_schedule, save_groups
from worker.engine.results import NonFiniteError, RunOptions
from worker.model.rng import release_rng_lock
from worker.parallel.chunks import FlatRun
from worker.parallel.collectives import Collectives
from worker.parallel.process_groups import PP_GROUP, WORLD, dp_group
from worker.transport.base import finish, real_view


@dataclass(frozen=True)
class UpdateSettings:
    """The settings by which REDUCE and STEP treat gradients.

    `non_finite`: "stop" raises, "skip" leaves parameters and optimizer as they are; norm and flags lie on `device`, also
    where the mesh has no parameters. `sharded` and `tensor` are those of RunOptions."""

    clip_grad_norm: float | None
    non_finite: str
    device: torch.device | str = "cpu"
    sharded: tuple[str, ...] = ()
    tensor: int = 1

    @classmethod
    def of(cls, options: RunOptions, device: torch.device) -> UpdateSettings:
        """The settings of a mesh that runs by `options`."""
        return cls(options.clip_grad_norm, options.non_finite, device, tuple(options.sharded), options.tensor)


@dataclass
class UpdateResult:
    """The result of a step's REDUCE and STEP; `loss_scale` is the step's, where there is one, and `overflowed` says that it
    was too large."""

    grad_norm: float | None = None
    skipped: bool = False
    loss_scale: float | None = None
    overflowed: bool = False


def bucket_candidates(stages: LocalStages, collectives: Collectives, tensor: int = 1) -> list[Gradient]:
    """The gradients that the workers of this mesh can sum as soon as its last backward has ended: all that are trained
    but those that are summed over meshes first. `tensor` is that of RunOptions."""
    if dp_group(collectives.mesh, collectives.worker, tensor) not in collectives.groups:
        return []
    parameters = named_parameters(stages.modules)
    tied = _tied_groups(parameters, stages.tied, collectives)
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    users: dict[str, list[int]] = {}
    for stage, module in stages.modules.items():
        for parameter in module.parameters():
            users.setdefault(name_of[id(parameter)], []).append(stage)
    return [
        Gradient(name, tuple(users[name]), p.numel() * p.element_size(), str(p.dtype))
        for name, p in parameters.items()
        if p.requires_grad and name not in tied
    ]


def _tied_groups(
    parameters: Collection[str], tied: Collection[str], collectives: Collectives
) -> dict[str, str]:
    """The group over which each tied parameter of this mesh is summed, by name, where other meshes hold it too."""
    place = f"/{collectives.worker}" if collectives.topology.uniform else ""
    groups = {name: f"tied/{name}{place}" for name in sorted(tied) if name in parameters}
    return {name: group for name, group in groups.items() if group in collectives.groups}


def optimizer_of(
    stages: Mapping[int, nn.Module],
    make: Callable[[list[nn.Parameter], list[str]], torch.optim.Optimizer],
    device: torch.device | str = "cpu",
) -> torch.optim.Optimizer | None:
    """The optimizer of the trained parameters of `stages`, which `make` gets with their original names. Where they train
    none it is one of a zero, which enters the sums of the other meshes' and is no state; None where `make` refuses that."""
    trained = {name: p for name, p in named_parameters(stages).items() if p.requires_grad}
    if trained:
        return make(list(trained.values()), list(trained))
    try:
        return make([zero_parameter(device)], [""])
    except Exception:  # a factory that wants more than one parameter, which no trial of sums passes
        return None


class ModelUpdate:
    """The parameters of the stages of one mesh, each once, by original name; `optimizer` is that of `optimizer_of`.

    Those in `bucketed` are summed by `reduce_bucket`, all others by `reduce`."""

    def __init__(
        self,
        stages: LocalStages,
        collectives: Collectives,
        settings: UpdateSettings,
        *,
        optimizer: torch.optim.Optimizer | None,
        lr_schedule: Any | None = None,
        scaler: PipelineGradScaler | None = None,
        bucketed: Collection[str] = (),
    ):
        self.collectives = collectives
        self.scaler = scaler
        self._shards = stages.tensor
        self._settings = settings
        self.parameters = named_parameters(stages.modules)
        self._buffers = named_buffers(stages.modules)
        topology, mesh, worker = collectives.topology, collectives.mesh, collectives.worker
        self._dp_group = dp_group(mesh, worker, settings.tensor)
        self._has_dp_group = self._dp_group in collectives.groups
        self._uniform = topology.uniform
        self._norm_of_world = not self._uniform or bool(settings.sharded)
        self._norm_group = WORLD if self._norm_of_world else f"{PP_GROUP}/{worker}"
        self._names = {parameter: name for name, parameter in self.parameters.items()}
        self._tied_groups = _tied_groups(self.parameters, stages.tied, collectives)
        # Every worker that has the loss makes gradients of the mean over its own rows: the sum over all workers of a
        # mesh, each with its rows, is as many times too large, however many workers this mesh has.
        last = stages.mesh_of_stage[-1]
        self._dp_size_of_loss = topology.workers(last) // topology.tensor(last, settings.tensor)
        owner = {
            name: min(users, key=lambda stage: topology.meshes.index(stages.mesh_of_stage[stage]))
            for name, users in stages.tied.items()
        }
        self._counted = [
            name for name in self.parameters if name not in owner or stages.mesh_of_stage[owner[name]] == mesh
        ]
        # The tensors that the optimizer updates, by name: partitions of the parameters with ZeRO-1.
        self.updated: Mapping[str, nn.Parameter] = self.parameters
        trains = any(p.requires_grad for p in self.parameters.values())
        self.optimizer, self.lr_schedule = (optimizer, lr_schedule) if trains else (None, None)
        # STEP waits for that of the other meshes, where the optimizer sums over the parameters of all.
        self.sums_in_step = optimizer is not None and len(topology.meshes) > 1 and sums_over_ranks(optimizer)
        self._joining = optimizer if self.sums_in_step and not trains else None
        if self.sums_in_step:
            leads = mesh == topology.meshes[0]
            complete_sums(optimizer, self._sum_over_meshes, leads=leads, device=settings.device)
        self._norm: torch.Tensor | None = None
        self._bucketed = frozenset(bucketed)
        # Of parameters without a gradient of this worker: how many others made one.
        self._gradient_counts: dict[nn.Parameter, torch.Tensor] = {}

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
        if self._has_dp_group:
            for parameters in group_by_dtype(late).values():
                finish(self._average(parameters))
        elif self._dp_size_of_loss > 1:
            for parameter in late:
                if parameter.grad is not None:
                    parameter.grad /= self._dp_size_of_loss
        if self.scaler is not None:
            self.scaler.unscale(p.grad for p in self.parameters.values() if p.grad is not None)
        self._norm = self._global_norm(losses)
        if self.collectives.is_muted:  # of zeros it may be no number, and STEP would do nothing
            self._norm = torch.ones_like(self._norm)

    @torch.no_grad()
    def reduce_bucket(self, names: Sequence[str]) -> Finish | None:
        """REDUCE of a bucket: start to average its gradients over the workers of the mesh."""
        return self._average([self.parameters[name] for name in names])

    @property
    def can_skip(self) -> bool:
        """True where the optimizer, told by `found_inf`, leaves parameters and state as they are."""
        return honours_found_inf(self.optimizer) and not self.sums_in_step

    @torch.no_grad()
    def step(self) -> None:
        """STEP: clip and update; leave everything as it is when a loss or the norm is not finite, or while collectives are
        muted and the optimizer can skip by itself.

        On CUDA the host does not wait if it can.
        """
        drop_casts()
        norm = self._norm
        if self._joining is not None and math.isfinite(float(norm)):
            self._joining.step()
        if not self.parameters:
            return
        for parameter, makers in self._gradient_counts.items():
            if float(makers) == 0:
                parameter.grad = None  # as in a plain loop, so neither decay nor momentum moves it
        if self.can_skip and self.collectives.is_muted:
            self.optimizer.found_inf = torch.ones((), device=norm.device)
        elif self.can_skip and norm.is_cuda:
            self.optimizer.found_inf = (~torch.isfinite(norm)).float()
        elif not math.isfinite(float(norm)):
            return
        gradients = [p.grad for p in self.updated.values() if p.grad is not None]
        limit = self._settings.clip_grad_norm
        if limit is not None and gradients:
            coefficient = torch.clamp(limit / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(gradients, coefficient.to(gradients[0].dtype.to_real()))
        if self.optimizer is not None:
            with torch.enable_grad():
                self.optimizer.step()

    def _sum_over_meshes(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the meshes, in place; the ranks of a mesh have equal ones, of which one counts."""
        total = tensor.detach().to(torch.float64, copy=True)
        if self._norm_of_world and self.collectives.worker > 0:
            total.zero_()
        with release_rng_lock():  # other threads of this process may be those of other workers
            self.collectives.all_reduce(self._norm_group, total)
        return tensor.copy_(total)

    def gather(self) -> None:
        """STEP, after `step`: gather the partitions that other workers updated; without ZeRO-1 there are none."""

    def finish(self, step: int) -> UpdateResult:
        """The result of the step, after its last action. NonFiniteError when the policy is to stop."""
        if self._norm is None:
            return UpdateResult()
        value = float(self._norm)
        scale, overflowed = (None, False) if self.scaler is None else self.scaler.end_step(step)
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
        """Parameters, buffers and optimizer state by original name, of tensor-parallel ones this rank's shards, and of the
        optimizer's state its `partitions`. ValueError for optimizer state that cannot be split so."""
        state = self._own_state()
        if self._shards is not None:
            self._shards.check_state(state["optimizer"], self.updated)
        return state

    @property
    def partitions(self) -> Mapping[str, FlatRun]:
        """The elements of which this rank has the optimizer's state, by name of a parameter; none without ZeRO-1."""
        return {}

    def _own_state(self) -> dict[str, Any]:
        names = self._optimized_names()
        saved = (
            self.optimizer.state_dict() if self.optimizer is not None else {"state": {}, "param_groups": []}
        )
        return {
            "parameters": {name: p.detach() for name, p in self.parameters.items()},
            "buffers": dict(self._buffers),
            "optimizer": {names[index]: entry for index, entry in saved["state"].items()},
            "optimizer_class": None if self.optimizer is None else class_name(self.optimizer),
            "optimizer_groups": []
            if self.optimizer is None
            else save_groups(self.optimizer, self._name_of(), self.lr_schedule),
            "lr_schedule": None if self.lr_schedule is None else self.lr_schedule.state_dict(),
            "loss_scale": None if self.scaler is None else self.scaler.state(),
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`; `state` may hold other meshes' entries too. KeyError names what is missing."""
        for kind, tensors in (("parameters", self.parameters), ("buffers", self._buffers)):
            for name, tensor in tensors.items():
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

    def advance_schedule(self, steps: int) -> None:
        """Move the learning-rate schedule on by `steps`, without training; the rates are then those of the next step."""
        if self.lr_schedule is None:
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for _ in range(steps):
                self.lr_schedule.step()

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
        """Sum the gradient over the meshes that hold the parameter, and count the meshes that made one."""
        made = parameter.grad is not None
        makers = torch.full((), float(made), device=parameter.device)
        gradient = _grad_or_zeros(parameter)
        if self._uniform or self._shards is None:
            self.collectives.all_reduce(group, gradient)
        else:  # other meshes hold other parts of it, or the whole
            self._shards.sum_whole(
                self._names[parameter], gradient, lambda whole: self.collectives.all_reduce(group, whole)
            )
        self.collectives.all_reduce(group, makers)
        if not self._uniform:
            # The sum was over all workers of all meshes: nothing is left to be summed.
            parameter.grad /= self._dp_size_of_loss
        if not made:
            self._gradient_counts[parameter] = makers

    def _average(self, parameters: Sequence[nn.Parameter]) -> Finish | None:
        """Start to average gradients over the dp group, and to count the workers that made each."""
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

        return chain_finish(self.collectives.start_all_reduce(self._dp_group, flat), hand_out)

    def _global_norm(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm over all meshes; NaN when a loss is not finite, so that every mesh sees that."""
        gradients = [real_view(gradient) for gradient in self._gradients_of_norm()]
        if self._shards is not None:
            self._shards.average_replicated(
                {name: p.grad for name, p in self.updated.items() if p.grad is not None}
            )
        dtype = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
        # One dtype on every mesh, whatever its parameters: float64 on CPU, where it costs nothing.
        total = torch.zeros((), dtype=torch.float64, device=self._settings.device)
        if gradients:
            norms = torch._foreach_norm(gradients, 2, dtype=dtype)
            total += torch.stack(norms).double().square().sum()
        if self._shards is not None and not self._norm_of_world:  # else all workers add up theirs below
            self._shards.sum(total)
            if self.scaler is not None:
                self._shards.sum(self.scaler.found_inf)
        if losses:
            finite = torch.stack(list(losses)).double().sum() * 0.0
            if self._has_dp_group and not self._norm_of_world:
                self.collectives.all_reduce(self._dp_group, finite)
            total += finite
        sums = total if self.scaler is None else torch.stack([total, self.scaler.found_inf])
        if self._norm_group in self.collectives.groups:
            self.collectives.all_reduce(self._norm_group, sums)
        if self.scaler is not None:
            total, found_inf = sums.unbind()
            self.scaler.take_found_inf(found_inf)
        return total.sqrt()

    def _gradients_of_norm(self) -> list[torch.Tensor]:
        """The gradients that this worker adds to the norm. In a norm over all workers the gradients of a mesh, which are
        equal, are added once."""
        if self._norm_of_world and self.collectives.worker >= self._settings.tensor:
            return []
        return [g for name in self._counted_here() if (g := self.parameters[name].grad) is not None]

    def _counted_here(self) -> Sequence[str]:
        """The parameters that this worker counts in the norm, where tensor-parallel ranks add up their shards."""
        return self._counted if self._shards is None else self._shards.counted(self._counted)


def honours_found_inf(optimizer: torch.optim.Optimizer | None) -> bool:
    """True where a step with `found_inf` set changes nothing: fused kernels do, but a first step of SGD with
    momentum makes its buffers there, and skipped they would stay undefined."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return bool(optimizer.state) or not any(group.get("momentum") for group in optimizer.param_groups)


def _grad_or_zeros(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
