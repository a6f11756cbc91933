"""Defects planted in the engine's own parts are found, each with the first tensor that differs and where it was made."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tests.tiers import some_by_day
from tests.worker.verify.proving import gpt, pictures, proof_of
from worker.actor import loaded
from worker.engine import stage as stage_module
from worker.engine.autograd import WeightBackward
from worker.engine.engine import Engine
from worker.engine.optim.reduce_and_step import ModelUpdate
from worker.engine.stage import StageRunner
from worker.engine.stage_io import StageTensors
from worker.model.rng import RandomState
from worker.model.stages import StageBuilder
from worker.transport.gloo import GlooTransport

SPLIT = {"schedule": "zb-h1"}


def around(monkeypatch, owner, name, make):
    """Put `make(original)` in the place of a method."""
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def gradient_scaled(monkeypatch):
    """What stage 1 passes back is half as large again."""

    def make(original):
        def pass_back(self, saved, found, microbatch):
            if self._stage == 1:
                found = [None if one is None else one * 1.5 for one in found]
            return original(self, saved, found, microbatch)

        return pass_back

    around(monkeypatch, StageTensors, "pass_back", make)
    return gpt(), r"gradient of '.*' of stage 0.* on m0 differs .*1\.5 times .*made by 0B0 on m0"


def microbatch_twice(monkeypatch):
    """Stage 1 adds the gradients of microbatch 2 twice."""

    before = {}

    def run_again(original):
        def ran(self, saved, microbatch, **how):
            if (self._stage, microbatch) == (1, 2):
                before.update({p: p.grad.clone() for p in self._module.parameters()})
            return original(self, saved, microbatch, **how)

        return ran

    def pass_back(original):
        def passed(self, saved, found, microbatch):
            if (self._stage, microbatch) == (1, 2):
                for p, gradient in before.items():
                    p.grad += p.grad - gradient
            return original(self, saved, found, microbatch)

        return passed

    around(monkeypatch, StageRunner, "_run_again", run_again)
    around(monkeypatch, StageTensors, "pass_back", pass_back)
    return gpt(), r"gradient of '.*' of stage 1 on m1 differs .*made by 1B2 on m1$"


def tied_in_one_stage(monkeypatch):
    """The gradient of the tied weight is not summed over its stages, which lie on different meshes."""

    def make(original):
        def init(self, *values, **arguments):
            original(self, *values, **arguments)
            self._tied_groups = {}

        return init

    around(monkeypatch, ModelUpdate, "__init__", make)
    return gpt(), r"gradient of '.*' of stage 2 on m2 differs .*made by REDUCE on m2"


def tied_on_one_mesh(monkeypatch):
    """Two stages of one mesh have a copy each of what should be one parameter."""
    from worker.actor import loaded
    from worker.engine import engine

    for module in (loaded, engine):
        monkeypatch.setattr(module, "tie_local_parameters", lambda *_: None)
    spec = gpt(schedule="auto", stages=2, meshes=1)
    return spec, r"gradient of '.*' of stage 0, 1 on m0 differs"


def stale_receive_buffer(monkeypatch):
    """What the last mesh receives of microbatch 1 ends elsewhere: its buffer keeps what was there."""
    seen = []

    def make(original):
        def receive(self, peer, tag, out):
            if self.mesh == "m2" and peer == "m1":
                seen.append(tag)
                if len(seen) % 4 == 2:
                    out = torch.empty_like(out)
            return original(self, peer, tag, out)

        return receive

    around(monkeypatch, GlooTransport, "receive", make)
    return gpt(), r"sent is not what was used: SEND_F on m1 to RECV_F on m2 of microbatch 1"


def dropout_repeats(monkeypatch):
    """Every microbatch is dropped out as the first one."""
    around(
        monkeypatch,
        RandomState,
        "forward",
        lambda original: lambda self, step, microbatch, stage: original(self, step, 0, stage),
    )
    return gpt(dropout=0.2), r"loss of microbatch 1 is .*made by 0F1 on m0, whose inputs are equal"


def optimizer_group_lost(monkeypatch):
    """The optimizer of mesh m1 is given all its parameters but the last ones."""

    def make(original):
        def optimizer_of(stages, make_optimizer, device):
            def of_fewer(parameters, names):
                return make_optimizer(parameters[:-2], names[:-2])

            return original(stages, of_fewer if 1 in stages else make_optimizer, device)

        return optimizer_of

    around(monkeypatch, loaded, "optimizer_of", make)
    return gpt(), r"step 1: after STEP on m1, '.*' did not change"


def buffers_not_updated(monkeypatch):
    """The forwards of stage 1 leave its running statistics as they were."""

    def make(original):
        def forward(self, microbatch):
            before = self._buffers.copy() if self._stage == 1 else {}
            original(self, microbatch)
            self._buffers._put(before)

        return forward

    around(monkeypatch, StageRunner, "forward", make)
    return pictures(), r"step 1: buffer '.*' differs .* after the forwards of stage 1 on m1"


def loss_scaled(monkeypatch):
    """The loss of a microbatch counts as if there were half as many."""

    def make(original):
        def settings(self, loss):
            made = original(self, loss)
            return replace(made, microbatches=made.microbatches // 2)

        return settings

    around(monkeypatch, Engine, "_compute_settings", make)
    return (
        gpt(),
        r"gradient of '.*' of stage .*2.* on m2 differs .* it is 2 times the plain .*made by 2B0 on m2",
    )


def not_clipped(monkeypatch):
    """No mesh clips its gradients."""

    def make(original):
        def init(self, *values, **arguments):
            original(self, *values, **arguments)
            self._settings = replace(self._settings, clip_grad_norm=None)

        return init

    around(monkeypatch, ModelUpdate, "__init__", make)
    return gpt(), r"made by STEP on m2: it was not clipped"


def begins_elsewhere(monkeypatch):
    """One weight of stage 1 is drawn again, as nearly the same."""

    def make(original):
        def stage(self, index):
            made = original(self, index)
            if index == 1 and len(made.inputs) == 1:
                with torch.no_grad():
                    next(made.parameters()).view(-1)[0] += 1e-6
            return made

        return stage

    around(monkeypatch, StageBuilder, "stage", make)
    spec = gpt()
    spec["training"]["check_trace"] = False  # which would tell first
    return spec, r"before the first step: '.*' of stage 1 on m1 does not begin with the model's values"


def not_emptied(monkeypatch):
    """A step begins with the gradients of the one before."""

    def begin(self):
        self._norm = None

    monkeypatch.setattr(ModelUpdate, "begin", begin)
    return gpt(), r"step 2: the gradient of '.*' was not emptied before the step"


def overwritten_before_it_is_sent(monkeypatch):
    """What stage 0 sends of microbatch 3 is written to when its send begins."""
    sent = []

    def make(original):
        def send(self, peer, tag, tensor):
            if (self.mesh, peer) == ("m0", "m1"):
                sent.append(tag)
                if len(sent) % 4 == 0:
                    tensor.data.mul_(1.01)
            return original(self, peer, tag, tensor)

        return send

    around(monkeypatch, GlooTransport, "send", make)
    return gpt(), r"sent is not what was used: SEND_F on m0 to RECV_F on m1 of microbatch 3"


def forward_differs(monkeypatch):
    """Stage 1 computes a little beside."""

    def make(original):
        def accept(self, results):
            made = original(self, results)
            return [one * 1.01 for one in made] if self._stage == 1 else made

        return accept

    around(monkeypatch, StageRunner, "_accept", make)
    return gpt(), r"loss of microbatch 0 is .*made by 1F0 on m1, whose inputs are equal and whose output '"


def weight_backward_skipped(monkeypatch):
    """Stage 1 leaves out W of microbatch 3."""

    def make(original):
        def backward_weight(self, microbatch):
            if (self._stage, microbatch) == (1, 3):
                self._weights[microbatch] = WeightBackward(), self._weights[microbatch][1]
            original(self, microbatch)

        return backward_weight

    around(monkeypatch, StageRunner, "backward_weight", make)
    return gpt(**SPLIT), r"gradient of '.*' of stage 1 on m1 differs .*made by 1W3 on m1$"


def schedule_stands(monkeypatch):
    """The learning rate of one mesh never changes."""

    def make(original):
        def init(self, *arguments, **options):
            original(self, *arguments, **options)
            if self.collectives.mesh == "m1":
                self.lr_schedule = None

        return init

    around(monkeypatch, ModelUpdate, "__init__", make)
    return gpt(
        lr_schedule="cosine"
    ), r"step 2: the learning rate on m1 is 0\.01, in the plain model 0\.009\d*$"


def target_of_another(monkeypatch):
    """The losses of the first two microbatches see each other's targets."""

    def make(original):
        def loss(self, output, microbatch):
            targets = self._state.targets
            self._state.targets = [targets[1], targets[0], *targets[2:]]
            try:
                return original(self, output, microbatch)
            finally:
                self._state.targets = targets

        return loss

    around(monkeypatch, StageRunner, "_loss", make)
    return gpt(), r"step 1: the loss of microbatch 0 is .*made by the loss of 2F0 on m2, since .*target"


def backward_of_another(monkeypatch):
    """Of microbatch 1 the gradient is computed on the activations of microbatch 0."""

    def make(original):
        def backward(roots, gradients, inputs, **how):
            rolled = [torch.roll(one, 1, 0) if one.dim() else one for one in gradients]
            return original(roots, rolled, inputs, **how)

        return backward

    around(monkeypatch, stage_module, "backward_input", make)
    return gpt(), r"gradient of '.*' of stage 1 on m1 differs .*made by 1B0 on m1"


def summed_over_workers(monkeypatch):
    """Data-parallel workers sum gradients and do not divide."""

    def make(original):
        def average(self, parameters):
            for parameter in parameters:
                parameter.grad.mul_(self.collectives.topology.workers_per_mesh)
            return original(self, parameters)

        return average

    around(monkeypatch, ModelUpdate, "_average", make)
    return gpt(stages=2, meshes=2, workers_per_mesh=2), r"it is 2 times the plain .*made by REDUCE on m1"


def recomputed_differently(monkeypatch):
    """A stage that computes its forward again draws other numbers then."""

    def make(original):
        def run_again(self, saved, microbatch, **how):
            step, self._state.step = self._state.step, self._state.step + 1
            backward = original(self, saved, microbatch, **how)
            self._state.step = step
            return backward

        return run_again

    around(monkeypatch, StageRunner, "_run_again", make)
    spec = gpt(dropout=0.2)
    spec["pipeline"]["recompute"] = "all"
    return spec, r"loss of microbatch 0 is .*made by the loss of 2F0 on m2"


def parameter_lost(monkeypatch):
    """A weight of stage 1 is a constant there: nobody trains it."""

    def make(original):
        def stage(self, index):
            made = original(self, index)
            if index == 1 and len(self._members) == 3:
                name, weight = next((n, p) for n, p in made.body.named_parameters() if "expand" in n)
                del made.body._parameters[name], made.original_names[f"body.{name}"]
                made.body.register_buffer(name, weight.detach(), persistent=False)
            return made

        return stage

    around(monkeypatch, StageBuilder, "stage", make)
    spec = gpt()
    spec["training"]["check_trace"] = False
    return spec, r"step 1: 'blocks\.1\.expand\..*' is in no stage, and in the plain model it has a gradient"


def step_fails(monkeypatch):
    """A stage raises in the second step."""

    def make(original):
        def forward(self, microbatch):
            if self._state.step == 2 and self._stage == 1:
                raise ZeroDivisionError("planted")
            original(self, microbatch)

        return forward

    around(monkeypatch, StageRunner, "forward", make)
    return gpt(), r"step 2: the pipeline failed: .*planted"


DEFECTS = [
    gradient_scaled,
    microbatch_twice,
    tied_in_one_stage,
    stale_receive_buffer,
    dropout_repeats,
    optimizer_group_lost,
    buffers_not_updated,
    loss_scaled,
    not_clipped,
    begins_elsewhere,
    not_emptied,
    overwritten_before_it_is_sent,
    weight_backward_skipped,
    schedule_stands,
    target_of_another,
    tied_on_one_mesh,
    backward_of_another,
    forward_differs,
    parameter_lost,
    summed_over_workers,
    recomputed_differently,
    step_fails,
]


@some_by_day("defect", DEFECTS, by_day=2, ids=lambda defect: defect.__name__)
def test_a_planted_defect_is_found_with_what_differs_first_and_where(defect, monkeypatch):
    with monkeypatch.context() as patch:
        spec, message = defect(patch)
        proof = proof_of(spec)
    assert proof.difference is not None, "not found"
    assert re.search(message, proof.difference), proof.difference
    assert proof.to_json()["equal"] is False


class NotANumber(torch.nn.Module):
    """Cross entropy, but no number where the targets' sum is even."""

    def forward(self, output, target):
        loss = torch.nn.functional.cross_entropy(output, target)
        return loss * (1.0 if target.sum() % 2 else float("nan"))


@pytest.mark.slow
def test_a_step_that_both_leave_out_is_equal_and_one_that_both_stop_at_is_told_as_that():
    spec = pictures()
    spec["loss"] = {"factory": f"{__name__}:NotANumber"}
    spec["training"] |= {"microbatches": 1, "non_finite": "skip"}
    proof = proof_of(spec, steps=6)
    assert (proof.difference, proof.steps) == (None, 6)
    assert proof.worst.kinds["gradients"][0] < 6 * proof.worst.kinds["initial parameters"][0], "some left out"
    spec["training"]["non_finite"] = "stop"
    assert re.search(
        r"the pipeline failed: NonFinite.*gradients are not finite either", proof_of(spec, 6).difference
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        gpt(),
        gpt(dropout=0.2),
        gpt(**SPLIT, dropout=0.2),
        gpt(lr_schedule="cosine"),
        gpt(schedule="auto", stages=2, meshes=1),
        gpt(stages=2, meshes=2, workers_per_mesh=2),
        pictures(),
        pictures(workers_per_mesh=2),
    ],
    ids=lambda spec: f"{spec['pipeline']['schedule']}-{spec['resources']}-{spec['model']['factory']}",
)
def test_the_jobs_of_the_defects_are_equal_without_them(spec):
    proof = proof_of(spec)
    assert proof.difference is None
    assert proof.steps == 3
    assert {"losses", "gradients", "parameters after the step"} <= set(proof.worst.kinds)
    assert ("transfers" in proof.worst.kinds) is (spec["resources"]["meshes"] > 1)
