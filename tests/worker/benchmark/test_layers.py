"""Operations of a model, counted by layer: against closed forms, on whatever kernels torch takes here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from worker.benchmark import layer_costs
from worker.benchmark.layer_costs import count_flops, measure_layers
from worker.contract.profile import LayerProfile
from worker.driver.metrics import step_flops, total_peak_flops
from worker.examples import gpt
from worker.machine.telemetry import gpu_peak_flops, peak_flops_by_name
from worker.model.export import trace

ROWS, LENGTH, WIDTH, HEADS, VOCABULARY, LAYERS = 3, 16, 32, 4, 65, 2


def profile(model: nn.Module, *inputs: torch.Tensor, target: torch.Tensor, loss) -> LayerProfile:
    return measure_layers(trace(model, inputs), loss, target, repeats=1)


def test_a_transformer_needs_six_operations_a_weight_and_token_and_its_attention():
    """Kaplan et al. 2020, PaLM's appendix B: 6 N T, and 12 of length and width for each token and layer."""
    model = gpt.build(layers=LAYERS, width=WIDTH, heads=HEADS, length=LENGTH, vocab=VOCABULARY)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH))
    found = profile(model, tokens, target=tokens, loss=functional.cross_entropy)
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    attention = 12 * LAYERS * LENGTH * WIDTH
    assert sum(layer.flops for layer in found.layers) == ROWS * LENGTH * (6 * matrices + attention)
    assert LayerProfile.from_json(found.to_json()) == found


class Blocks(nn.Module):
    """Two layers; with `again` the second asks to be recomputed."""

    def __init__(self, again: bool):
        super().__init__()
        self.first, self.second, self.again = nn.Linear(8, 16), nn.Linear(16, 4), again

    def forward(self, x):
        x = self.first(x).relu()
        return checkpoint(self.second, x, use_reentrant=False) if self.again else self.second(x)


@pytest.mark.parametrize("again", [False, True])
def test_what_is_computed_again_is_no_work_of_the_model(again: bool):
    found = profile(Blocks(again), torch.randn(5, 8), target=torch.randn(5, 4), loss=functional.mse_loss)
    # the first layer needs no gradient of its input: two products instead of three
    assert [layer.flops for layer in found.layers if layer.flops] == [2 * 2 * 5 * 8 * 16, 3 * 2 * 5 * 16 * 4]


def test_frozen_weights_have_no_gradient_to_compute():
    model = Blocks(False)
    model.first.requires_grad_(False)
    found = profile(model, torch.randn(5, 8), target=torch.randn(5, 4), loss=functional.mse_loss)
    assert sum(layer.flops for layer in found.layers) == 2 * 5 * 8 * 16 + 2 * 2 * 5 * 16 * 4


def test_what_cannot_be_counted_runs_all_the_same(monkeypatch: pytest.MonkeyPatch):
    times = []

    def run() -> None:
        times.append(len(times))
        if len(times) == 1:
            raise NotImplementedError("there is no rule for this operator and mode")

    assert count_flops(run) is None and len(times) == 2


def a_profile(*flops: int | None) -> LayerProfile:
    layers = [
        {
            "name": f"l{index}",
            **dict.fromkeys(("forward_s", "backward_input_s", "backward_weight_s"), 1.0),
            **dict.fromkeys(("activation_bytes", "weight_stash_bytes", "parameter_bytes"), 0),
            "flops": one,
        }
        for index, one in enumerate(flops)
    ]
    rest = {"edges": [], "device_type": "cpu", "microbatch": "", "parameter_sizes": {}}
    return LayerProfile.from_json({"layers": layers, **rest})


def test_a_step_is_every_workers_layers_times_the_microbatches():
    """Two meshes; the second has two workers, each of which has half of the samples of the first's."""
    plan = {"stage_starts": ["l0", "l2", "l3"], "mesh_of_stage": ["m0", "m1", "m0"], "microbatches": 4}
    whole, half = a_profile(10, 20, 40, 80), a_profile(5, 10, 20, 40)
    workers = [("m0", whole), ("m1", half), ("m1", half)]
    assert step_flops(workers, **plan) == 4 * (10 + 20 + 80 + 2 * 20)
    assert step_flops([*workers[:2], ("m1", a_profile(5, 10, None, 40))], **plan) is None
    assert step_flops([*workers[:2], ("m1", None)], **plan) is None


# Of the vendor's data sheets, dense: the figure in bold print has sparsity and is twice as much.
@pytest.mark.parametrize(
    ("name", "numbers", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "tf32", 417),
        ("NVIDIA H200", "fp32", 67),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA A10", "fp16", 125),
        ("NVIDIA A10G", "fp16", None),  # another chip
        ("NVIDIA A40", "bf16", 149.7),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40", "bf16", 181.05),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA GH200 480GB", "bf16", 990),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("Tesla V100S-PCIE-32GB", "fp32", 16.4),
        ("Tesla V100-SXM2-16GB", "bf16", None),  # has none on tensor cores
        ("Tesla T4", "fp16", 65),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),  # a slice
        ("NVIDIA GeForce RTX 4090", "bf16", None),
        ("AMD Instinct MI300X", "bf16", None),
    ],
)
def test_peaks_are_the_vendors_dense_figures(name: str, numbers: str, tera: float | None):
    assert peak_flops_by_name(name, numbers) == (None if tera is None else pytest.approx(tera * 1e12))


def test_a_gpus_own_peak_is_of_the_numbers_that_it_multiplies(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert gpu_peak_flops("bf16") == gpu_peak_flops("fp16") == 989e12
    assert gpu_peak_flops("fp32") == 67e12
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    assert gpu_peak_flops("fp32") == 494e12 and gpu_peak_flops("bf16") == 989e12


def test_the_peak_of_a_job_is_that_of_its_gpus():
    assert total_peak_flops([1e12, 3e12], 1) == 4e12
    assert total_peak_flops([1e12] * 4, 2) == 2e12, "two workers share each GPU"
    assert total_peak_flops([1e12, None], 1) is None and total_peak_flops([], 1) is None


class SimulatedCuda:
    """A device and a host on one clock: calls of an action take the host `call_s` each, and the device `kernel_s` behind
    what is enqueued already."""

    def __init__(self):
        self.host_s = self.device_s = 0.0

    def run(self, calls, call_s, kernel_s):
        for _ in range(calls):
            self.host_s += call_s
            self.device_s = max(self.device_s, self.host_s) + kernel_s

    def synchronize(self):
        self.host_s = self.device_s = max(self.host_s, self.device_s)

    def _sleep(self, cycles):
        self.device_s = max(self.device_s, self.host_s) + cycles / 1.5e9

    def Event(self, enable_timing):
        return SimulatedEvent(self)

    def process_time(self):
        return self.host_s


class SimulatedEvent:
    def __init__(self, cuda):
        self._cuda = cuda

    def record(self):
        self.at_s = max(self._cuda.device_s, self._cuda.host_s)

    def elapsed_time(self, end):
        return 1e3 * (end.at_s - self.at_s)


@pytest.mark.parametrize(("call_s", "kernel_s"), [(130e-6, 20e-6), (7e-6, 300e-6)])
def test_on_cuda_the_device_and_the_host_are_timed_apart(monkeypatch, call_s, kernel_s):
    """Of a device that waits for the host the events around an action tell the host's time."""
    cuda = SimulatedCuda()
    monkeypatch.setattr(layer_costs.torch, "cuda", cuda)
    monkeypatch.setattr(layer_costs.time, "process_time", cuda.process_time)
    calls = {"forward": 11, "backward": 23, "backward_input": 17, "backward_weight": 9}
    run = SimpleNamespace(
        **{name: lambda n=count: cuda.run(n, call_s, kernel_s) for name, count in calls.items()}
    )
    times = layer_costs._layer_times(run, torch.device("cuda"), 5, 60.0, selective=False)
    for name, count in calls.items():
        assert getattr(times, f"{name}_s") == pytest.approx(count * kernel_s)
        assert getattr(times.host, f"{name}_s") == pytest.approx(count * call_s)


def test_on_a_processor_nothing_is_timed_apart():
    found = profile(Blocks(False), torch.randn(5, 8), target=torch.randn(5, 4), loss=functional.mse_loss)
    assert all(layer.host is None for layer in found.layers)
    assert not any("host" in layer for layer in found.to_json()["layers"]), (
        "an older reader knows no such field"
    )
