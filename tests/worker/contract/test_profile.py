"""The measured profile: its bytes against autograd's own count, its times against calibrated work."""

import json
import time
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from worker.benchmark import layer_costs
from worker.benchmark.layer_costs import measure_layers
from worker.contract.profile import LayerProfile, OptimizerState
from worker.examples import gpt, unet
from worker.model.export import trace


class Clock:
    """A clock that only naps move."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    thread_time = perf_counter


CLOCK = Clock()


@torch.library.custom_op("slotline_tests::nap", mutates_args=())
def nap(x: torch.Tensor, forward_ms: float, backward_ms: float) -> torch.Tensor:
    """The identity, with a forward and a backward that take their time."""
    CLOCK.now_s += forward_ms / 1e3
    return x.clone()


@nap.register_fake
def _(x, forward_ms, backward_ms):
    return torch.empty_like(x)


def _nap_setup(ctx, inputs, output):
    ctx.milliseconds = inputs[2]


def _nap_backward(ctx, gradient):
    CLOCK.now_s += ctx.milliseconds / 1e3
    return gradient, None, None


nap.register_autograd(_nap_backward, setup_context=_nap_setup)


class Nap(nn.Module):
    """Takes 1 unit forward, 2 for the gradient of its input, 3 for that of its weight."""

    def __init__(self, unit_ms):
        super().__init__()
        self.weight, self.unit_ms = nn.Parameter(torch.tensor(1.0)), unit_ms

    def forward(self, x):
        return nap(x, self.unit_ms, 2 * self.unit_ms) * nap(self.weight, 0.0, 3 * self.unit_ms)


def test_times_are_those_of_forward_input_gradient_and_weight_gradient(monkeypatch):
    monkeypatch.setattr("worker.benchmark.layer_costs.time", CLOCK)
    model = nn.Sequential(nn.Linear(4, 4), Nap(10.0), Nap(20.0))
    profile = measure_layers(
        trace(model, (torch.randn(3, 4),)), functional.mse_loss, torch.randn(3, 4), repeats=5
    )
    for layer, unit in zip(profile.layers[1:], (0.01, 0.02), strict=True):
        assert layer.forward_s == pytest.approx(unit)
        assert layer.backward_input_s == pytest.approx(2 * unit)
        assert layer.backward_weight_s == pytest.approx(3 * unit)
        assert layer.backward_s == pytest.approx(5 * unit)
    assert profile.layers[0].backward_input_s == 0


def test_times_on_cpu_are_those_of_the_processor_whoever_else_uses_it():
    """A wait in a layer, as for a core that others use, is none of the layer's costs."""

    class Waiting(nn.Module):
        def forward(self, x):
            return torch.ops.slotline_tests.wait(x)

    @torch.library.custom_op("slotline_tests::wait", mutates_args=())
    def wait(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return x.clone()

    wait.register_fake(torch.empty_like)
    wait.register_autograd(lambda ctx, gradient: gradient)
    model = nn.Sequential(nn.Linear(4, 4), Waiting())
    profile = measure_layers(
        trace(model, (torch.randn(3, 4),)), functional.mse_loss, torch.randn(3, 4), repeats=2
    )
    assert profile.layers[-1].forward_s < 0.025


def test_split_backwards_are_measured_as_the_engine_runs_them():
    """Two layers that share a weight: of each one the engine's W multiplies what it took and the gradient of its output."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            return self.inner(torch.tanh(self.inner(x)))

    calls = []
    counted = layer_costs.backward_input

    def counting(*arguments, **options):
        gradients, rest = counted(*arguments, **options)
        calls.append(sorted(tuple(value.shape) for value in rest.tensors()))
        return gradients, rest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_costs, "backward_input", counting)
        measure_layers(
            trace(nn.Sequential(nn.Linear(8, 8), Twice()), (torch.randn(3, 8),)),
            functional.mse_loss,
            torch.randn(3, 8),
            repeats=2,
        )
    assert [(3, 8)] * 4 in calls


def test_activation_bytes_of_a_chain_are_what_autograd_keeps():
    batch, width = 16, 32
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))
    profile = measure_layers(
        trace(model, (torch.randn(batch, width),)), functional.mse_loss, torch.randn(batch, 4)
    )
    whole = batch * width * 4
    first, tanh, last = profile.layers
    assert first.activation_bytes == whole  # its input
    assert tanh.activation_bytes == whole  # its output
    assert last.activation_bytes == whole + 2 * batch * 4 * 4  # its input; the loss keeps output and target
    assert first.parameter_bytes == (width * width + width) * 4
    assert profile.parameter_sizes["0.weight"] == width * width * 4
    between = profile.edges[1]
    assert (between.saved_by_source, between.saved_by_target, between.bytes) == (True, True, whole)
    assert profile.edges[0].saved_by_source is False


@pytest.mark.slow
def test_shared_parts_of_the_sum_of_layers_equal_one_count_of_the_whole_model():
    """All layers together, each shared tensor once, keep what the unsplit model keeps."""
    from service.scheduler.job.cut import PipelineSetup
    from service.scheduler.job.partition import partition
    from service.scheduler.problem.spec import MeshSpec, NetworkSpec

    for model, inputs, target, loss in (
        (
            gpt.build(3, 16, 2, vocab=32, length=8),
            torch.randint(0, 32, (2, 8)),
            torch.randint(0, 32, (2, 8)),
            functional.cross_entropy,
        ),
        (unet.build(width=4), torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8), functional.mse_loss),
    ):
        profile = measure_layers(trace(model, (inputs,)), loss, target, repeats=1)
        result = partition(
            profile, PipelineSetup([MeshSpec(name="m")], NetworkSpec()), stages=1, microbatches=1
        )
        kept = {}
        fixed = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def keep(value, kept=kept, fixed=fixed):
            if value.untyped_storage().data_ptr() not in fixed:
                kept[value.untyped_storage().data_ptr()] = value
            return value

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            output = loss(model(inputs), target)
        expected = sum(value.untyped_storage().nbytes() for value in kept.values())
        assert result.spec.stages[0].activation_bytes == pytest.approx(expected, rel=0.02), type(model)
        del output


def test_a_profile_is_json_and_comes_back_equal():
    model = unet.build(width=4)
    image = torch.randn(2, 1, 8, 8)
    profile = measure_layers(trace(model, (image,)), functional.mse_loss, image, repeats=1)
    assert LayerProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    assert profile.device_type == "cpu"
    assert profile.microbatch == "[2, 1, 8, 8] float32"
    with pytest.raises(ValueError, match="LayerCost has unknown fields colour"):
        data = profile.to_json()
        LayerProfile.from_json({**data, "layers": [{**data["layers"][0], "colour": 1}]})
    with pytest.raises(ValueError, match="LayerProfile lacks edges"):
        LayerProfile.from_json({key: value for key, value in profile.to_json().items() if key != "edges"})


def test_tied_parameters_show_in_each_layer_and_count_once_in_all():
    model = gpt.build(2, 16, 2, vocab=32, length=8, tied=True)
    tokens = torch.randint(0, 32, (2, 8))
    profile = measure_layers(trace(model, (tokens,)), functional.cross_entropy, tokens, repeats=1)
    users = [layer.name for layer in profile.layers if "embed.token.weight" in layer.parameters]
    assert users == ["embed", "head"]
    assert sum(profile.parameter_sizes.values()) == sum(p.nbytes for p in model.parameters())


class Frozen(nn.Module):
    """A frozen layer, a trained one and a batch norm with its buffers."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.a.requires_grad_(False)
        self.register_buffer("scale", torch.ones(5), persistent=False)

    def forward(self, x):
        return self.b(self.norm(self.a(x))) * self.scale


@pytest.mark.parametrize(
    ("model", "inputs", "target", "loss", "begins"),
    [
        (Frozen(), torch.randn(4, 6), torch.randn(4, 5), functional.mse_loss, ["a", "b"]),
        (
            gpt.build(2, 16, 2, vocab=32, length=8, tied=True),
            torch.randint(0, 32, (2, 8)),
            torch.randint(0, 32, (2, 8)),
            functional.cross_entropy,
            ["embed", "blocks.1"],
        ),
    ],
    ids=["frozen and buffers", "tied"],
)
@pytest.mark.parametrize("stages", [1, 2])
def test_static_bytes_are_those_of_a_stage_that_has_trained_a_step(
    model, inputs, target, loss, begins, stages
):
    begins = begins[:stages]
    traced = trace(model, (inputs,))
    profile = measure_layers(traced, loss, target, repeats=1)
    starts = [[layer.name for layer in profile.layers].index(name) for name in begins]
    cut = trace(model, (inputs,)).cut(begins)
    for stage, first, end in zip(cut.stages, starts, [*starts[1:], len(profile.layers)], strict=True):
        trained = [p for p in stage.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        held = [*stage.parameters(), *(p.grad for p in trained), *stage.buffers()]
        held += [value for state in optimizer.state.values() for value in state.values()]
        assert profile.static_bytes(first, end, OptimizerState(2.0, 4)) == sum(t.nbytes for t in held)


def test_the_casts_of_weights_count_once_for_all_microbatches():
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 256))
    x, y = torch.randn(2, 64), torch.randn(2, 256)
    _, fp32 = measure_layers(trace(model, (x,)), functional.mse_loss, y, repeats=1).layers
    _, bf16 = measure_layers(
        trace(model, (x,), autocast=torch.bfloat16), functional.mse_loss, y, repeats=1
    ).layers
    cast = 128 * 256 * 2
    assert (fp32.cast_bytes, bf16.cast_bytes) == (0, cast)
    assert 0 < bf16.activation_bytes <= fp32.activation_bytes + 2 * 128 * 2
    profile = measure_layers(trace(model, (x,), autocast=torch.bfloat16), functional.mse_loss, y, repeats=1)
    trained = sum(2 * p.nbytes for p in model.parameters())
    assert profile.static_bytes(0, 2, OptimizerState()) == trained + sum(c.cast_bytes for c in profile.layers)


def test_a_correction_makes_all_activations_larger_and_is_part_of_the_json():
    x = torch.randn(2, 4)
    profile = measure_layers(trace(nn.Sequential(nn.Linear(4, 4)), (x,)), functional.mse_loss, x, repeats=1)
    met = LayerProfile.from_json(replace(profile, activation_factor=1.5).to_json())
    before, after = profile.layers[0].activation_bytes, met.corrected().layers[0].activation_bytes
    assert (after, met.corrected().activation_factor) == (1.5 * before, 1.0)


def test_a_profile_that_lacks_a_size_is_refused():
    x = torch.randn(2, 4)
    data = measure_layers(
        trace(nn.Sequential(nn.Linear(4, 4)), (x,)), functional.mse_loss, x, repeats=1
    ).to_json()
    with pytest.raises(ValueError, match="parameter_sizes lack"):
        LayerProfile.from_json({**data, "parameter_sizes": {}})


def test_measuring_changes_neither_the_model_nor_the_random_state():
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(4, 4))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.randn(3, 2, 4)
    torch.manual_seed(4)
    measure_layers(trace(model, (x,)), functional.mse_loss, x)
    drawn = torch.rand(2)
    torch.manual_seed(4)
    assert torch.equal(drawn, torch.rand(2))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
