"""A CUDA job under autocast, traced on CPU, has CUDA's types: beside torch's own lists, which need no GPU."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing._internal.autocast_test_lists import AutocastTestLists

from worker.model.autocast import cast_policies, cuda_autocast, registered_operators
from worker.model.export import trace

HALF = torch.bfloat16
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
BESIDE_LISTS = {"linalg_matrix_sqrth"}  # of torch 2.15, by a macro of its own
LISTS = {
    "lower": "LOWER_PRECISION_FP",
    "float": "FP32",
    "float result": "FP32_SET_OPT_DTYPE",
    "widest": "PROMOTE",
}


def in_header(name):
    body = re.search(rf"#define AT_FORALL_{name}\(_\)(.*?)\n\n", HEADER.read_text(), re.DOTALL)[1]
    return {entry.replace(", ", ".") for entry in re.findall(r"_\((\w+(?:, \w+)?)\)", body)}


def test_the_lists_are_those_of_torch_and_no_operator_is_missing():
    known = cast_policies()
    # a torch built for CUDA has cuDNN's RNN besides, of which no graph that is traced on CPU knows
    assert known.keys() == registered_operators("AutocastCUDA") - {"_cudnn_rnn"}
    for policy, name in LISTS.items():
        ours = {op for op, its in known.items() if its == policy and not op.startswith("cudnn_")}
        assert ours - BESIDE_LISTS == in_header(name) - BESIDE_LISTS, policy


def torch_cases():
    """(what torch's own tests of CUDA's autocast call, its arguments, the type that it has to compute in)."""
    lists = AutocastTestLists(torch.device("cpu"))
    kinds = {
        "torch_fp16": (torch, HALF),
        "torch_fp32": (torch, torch.float32),
        "nn_fp16": (torch._C._nn, HALF),
        "nn_fp32": (torch._C._nn, torch.float32),
        "methods_fp16": (None, HALF),
        "methods_fp32": (None, torch.float32),
    }
    for kind, (module, expected) in kinds.items():
        for case in getattr(lists, kind):
            name, args = case[0], case[1]
            if (
                name.startswith("cudnn") or name == "einsum" or (len(case) > 3 and case[3])
            ):  # only on CUDA; einsum's does not fit
                continue
            yield pytest.param(
                module,
                name,
                args,
                case[2] if len(case) > 2 and isinstance(case[2], dict) else {},
                expected,
                id=f"{kind}-{name}",
            )


@pytest.mark.parametrize(("module", "name", "args", "kwargs", "expected"), list(torch_cases()))
def test_an_operator_gives_the_type_that_torchs_own_tests_ask_of_cuda(module, name, args, kwargs, expected):
    args = [a.to(HALF) if isinstance(a, torch.Tensor) and a.dtype == torch.float16 else a for a in args]
    function = getattr(args[0], name) if module is None else getattr(module, name, None)
    if function is None:
        pytest.skip(f"this torch has no {name}")
    with cuda_autocast(HALF):
        found = function(*(args[1:] if module is None else args), **kwargs)
    found = found[0] if isinstance(found, tuple | list) else found
    assert found.dtype == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda full, half: torch.sum(half), torch.float32),
        (lambda full, half: torch.sum(half, dim=0, dtype=HALF), HALF),
        (lambda full, half: torch.cumsum(half, 0), torch.float32),
        (lambda full, half: half.softmax(-1), torch.float32),
        (lambda full, half: torch.softmax(half, -1, dtype=HALF), HALF),
        (lambda full, half: torch.norm(half), torch.float32),
        (lambda full, half: torch.norm(full.double()), torch.float64),
        (lambda full, half: torch.addcmul(half, half, full), torch.float32),
        (lambda full, half: torch.addcmul(half, half, half), HALF),
        (lambda full, half: torch.cat([half, full]), torch.float32),
        (
            lambda full, half: torch.nn.functional.cross_entropy(half, torch.zeros(4, dtype=torch.long)),
            torch.float32,
        ),
        (lambda full, half: torch.nn.functional.pad(half, (1, 1), mode="replicate"), HALF),
        (lambda full, half: torch.einsum("ij,jk->ik", full, full), HALF),
        (lambda full, half: full.double() @ full.double(), torch.float64),
        (lambda full, half: half + half, HALF),
    ],
)
def test_reductions_promotions_and_what_only_the_cpu_list_names(call, expected):
    full = torch.rand(4, 4)
    with cuda_autocast(HALF):
        assert call(full, full.to(HALF)).dtype == expected


def test_what_cuda_refuses_is_refused():
    with cuda_autocast(HALF), pytest.raises(RuntimeError, match="unsafe under autocast"):
        torch.nn.functional.binary_cross_entropy(torch.rand(3), torch.rand(3))


def test_afterwards_the_cpu_has_its_own_lists_again_also_after_an_error():
    norm, x = nn.LayerNorm(4), torch.rand(2, 4)
    before = registered_operators("AutocastCPU")
    with pytest.raises(ZeroDivisionError), cuda_autocast(HALF):
        assert norm(x.to(HALF)).dtype == torch.float32
        raise ZeroDivisionError
    assert registered_operators("AutocastCPU") == before
    with torch.autocast("cpu", dtype=HALF):
        assert norm(x.to(HALF)).dtype == HALF


class Asks(nn.Module):
    """A model that asks what type a layer norm gives, and ends in two stages with that between them."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        normed = self.norm(self.first(x))
        return self.last(normed) + x.to(normed.dtype)


@pytest.mark.parametrize(("device", "expected"), [("cpu", HALF), ("cuda", torch.float32)])
def test_a_trace_has_the_types_of_the_device_that_the_job_will_run_on(device, expected):
    traced = trace(Asks(), (torch.rand(2, 4),), autocast=HALF, device=device)
    asked = [n for n in traced.placed.module.graph.nodes if n.target is torch.ops.aten.to.dtype]
    assert [node.args[1] for node in asked] == [expected]
    assert [edge.dtype for edge in traced.cut(["first", "last"]).edges] == [expected]
