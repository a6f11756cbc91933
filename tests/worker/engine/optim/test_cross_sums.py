"""Optimizers whose sums over parameters are completed over ranks: those of libraries beside their own step, and who says
so."""

import functools
import importlib

import pytest
import torch
from torch import nn

from tests.missing import leave_out
from tests.worker import odd_optimizers
from worker.engine.optim.cross_sums import complete_sums, sums_over_ranks, zero_parameter
from worker.engine.optim.trials import check_pipeline_optimizer

LIBRARIES = {
    "prodigy": ("prodigyopt:Prodigy", {"safeguard_warmup": True, "weight_decay": 0.1, "d0": 1e-3}),
    "dadapt adam": ("dadaptation:DAdaptAdam", {"use_bias_correction": True, "weight_decay": 0.1}),
    "dadapt sgd": ("dadaptation:DAdaptSGD", {"momentum": 0.9}),
}


def library_optimizer(case, parameters, **more):
    path, arguments = LIBRARIES[case]
    library, _, name = path.partition(":")
    try:
        module = importlib.import_module(library)
    except ImportError:
        leave_out(f"{library} is not installed")
    return getattr(module, name)(parameters, **arguments, **more)


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 3), (5,), ())]


def trained(optimizer, parameters, missing):
    """The values after ten steps; in those of `missing` no parameter has a gradient but zeros, or none at all."""
    for step in range(10):
        for parameter, gradient in zip(parameters, values(step + 1), strict=True):
            parameter.grad = None if step in missing else gradient
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("case", LIBRARIES)
def test_the_trial_of_ranks_that_sum_equals_the_librarys_own_step_of_all_parameters(case):
    library_optimizer(case, [zero_parameter()])
    assert check_pipeline_optimizer(lambda parameters, _: library_optimizer(case, parameters)) == ""


@pytest.mark.parametrize("case", ["prodigy", "dadapt adam"])
@pytest.mark.parametrize("missing", [(), (0, 1, 6)])
def test_a_completed_step_is_the_librarys_and_leaves_nothing_but_its_state(case, missing):
    """Steps without gradients end early in the library, and enter the sum here."""
    plain, own = ([nn.Parameter(value.clone()) for value in values(0)] for _ in range(2))
    library, completed = library_optimizer(case, plain), library_optimizer(case, own)
    sums = []
    complete_sums(completed, lambda tensor: sums.append(tensor.shape) or tensor, leads=True)
    for expected, found in zip(
        trained(library, plain, missing), trained(completed, own, missing), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert sums == [torch.Size([2])] * 10
    assert {*completed.state} == {*own}
    (group,), (of_library,) = completed.param_groups, library.param_groups
    assert group["params"] == own and group["fsdp_in_use"] is False
    kinds = {key: type(value) for key, value in of_library.items()}
    assert {key: type(value) for key, value in group.items()} == kinds


def test_who_sums():
    (parameter,) = parameters = [zero_parameter()]
    assert not parameter.any() and not parameter.grad.any()
    assert sums_over_ranks(odd_optimizers.GlobalLamb(parameters))
    assert not sums_over_ranks(odd_optimizers.Prodigy(parameters))  # of its own, which no sum reaches
    assert not sums_over_ranks(torch.optim.AdamW(parameters))


class SumsOnce(odd_optimizers.GlobalLamb):
    """Sums in its first step only, on a rank with matrices."""

    def norm_of(self, tensors):
        if any(t.ndim > 1 for t in tensors):
            return super().norm_of(tensors)
        return 1.0


def test_ranks_that_do_not_sum_as_often_could_not_be_tried():
    said = check_pipeline_optimizer(lambda parameters, _: SumsOnce(parameters))
    assert said.startswith("RuntimeError: another rank ended before sum 1: all must sum as often")


def test_ranks_that_sum_other_shapes_could_not_be_tried():
    class Stacked(odd_optimizers.GlobalLamb):
        def norm_of(self, tensors):
            norms = torch.stack([t.norm().double() for t in tensors])
            return float((norms if self.sum_over_ranks is None else self.sum_over_ranks(norms)).norm())

    assert "ranks sum tensors of the shapes [[1], [4]" in check_pipeline_optimizer(
        functools.partial(lambda make, parameters, _: make(parameters), Stacked)
    )
