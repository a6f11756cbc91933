"""Cut models on a CUDA device: the same results, and a profile by CUDA events."""

import copy

import pytest
import torch
from torch.nn import functional

from tests.worker.model.odd_models import ODD_MODELS, make
from tests.worker.model.running import gradients, plain_step, step
from worker.benchmark.layer_costs import measure_layers
from worker.examples import gpt
from worker.model.export import trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", [name for name in ODD_MODELS if "dropout" not in name])
def test_cut_models_give_the_plain_results_on_the_device(name):
    model, inputs = make(name)
    traced = trace(model, inputs)
    graph = traced.cut(traced.layers)
    for stage in graph.stages:
        stage.to("cuda")
    found = step(graph, tuple(x.to("cuda") for x in inputs))
    plain = copy.deepcopy(model)  # on the CPU: some of these models make their constants there
    torch.testing.assert_close(found.cpu(), plain_step(plain, inputs), rtol=1e-9, atol=1e-11)
    for key, value in gradients(graph).items():
        torch.testing.assert_close(value.cpu(), plain.get_parameter(key).grad, rtol=1e-8, atol=1e-10)


def test_a_profile_of_a_gpt_has_times_and_bytes_of_the_device():
    tokens = torch.randint(0, 256, (4, 128))
    traced = trace(gpt.build(2, 256, 4), (tokens,))
    profile = measure_layers(traced, functional.cross_entropy, tokens, device="cuda")
    assert profile.device_type == "cuda"
    for layer in profile.layers:
        assert layer.forward_s > 0
        assert layer.activation_bytes > 0
