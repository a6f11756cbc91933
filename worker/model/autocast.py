"""Emulates CUDA's autocast lists for CPU tensors, so that a model traced on CPU gets the dtypes of its GPUs.

Stages run under autocast on CUDA, whose lists differ from CPU's: a layer norm gives float32 on CUDA and bfloat16
on CPU. What a trace bakes in (`x.to(y.dtype)`, dtypes of sent tensors) has to be CUDA's. The lists are those of
ATen/autocast_mode.h, and nothing for operators that only CPU's lists name. Replaces dispatcher kernels of the
whole process while it is active, under a lock.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# by what autocast does with the tensors of an operator
_CUDA_CAST_LISTS = {
    "lower": """
        _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
        conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
        einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
        _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
        scaled_dot_product_attention
        """,
    "float": """
        acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
        pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
        nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
        hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
        multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
        binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
        _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
        _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
        upsample_bicubic2d _upsample_bicubic2d_aa linalg_matrix_sqrth
        """,
    "float result": """
        prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
        linalg_matrix_norm.str_ord sum sum.dim_IntList
        """,
    "float norm": "norm.Scalar norm.ScalarOpt_dim",
    "widest": """
        addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
        """,
    "refused": "binary_cross_entropy",
}

_DISPATCH_KEY = "AutocastCPU"
_kernels_lock = threading.RLock()


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    """Autocast of CPU tensors to `dtype`, but with CUDA's lists; for the whole process as long as it lasts."""
    with _kernels_lock, torch.library._scoped_library("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that kernels are replaced
            for name, kernel in _kernels(dtype).items():
                library.impl(name, kernel, _DISPATCH_KEY, allow_override=True)
        with torch.autocast("cpu", dtype=dtype):
            yield


def cast_policies() -> dict[str, str]:
    """The CUDA autocast policy of each operator that this torch has, by its name in aten."""
    named = ((name, policy) for policy, names in _CUDA_CAST_LISTS.items() for name in names.split())
    return {name: policy for name, policy in named if hasattr(torch.ops.aten, name.partition(".")[0])}


def registered_operators(key: str) -> set[str]:
    """The operators of aten for which torch has kernels under a dispatch key."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _kernels(dtype: torch.dtype) -> dict[str, Callable[..., Any]]:
    there = registered_operators("AutocastCUDA")  # another torch may have fewer
    known = {name: policy for name, policy in cast_policies().items() if name in there}
    kernels: dict[str, Callable[..., Any]] = {
        name: functools.partial(_CAST_FUNCTIONS[policy], _operator(name), dtype)
        for name, policy in known.items()
    }
    others = registered_operators(_DISPATCH_KEY) - there
    return kernels | dict.fromkeys(others, torch.library.fallthrough_kernel)


def _operator(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _call_without_autocast(
    operator: torch._ops.OpOverload, to: torch.dtype | None, args: tuple, kwargs: dict
) -> Any:
    """The operator without autocast, on what autocast may cast: floating point of at most 32 bits."""

    def cast(value: Any) -> Any:
        return value.to(to) if to is not None and _may_cast(value) else value

    args, kwargs = pytree.tree_map(cast, (args, kwargs))
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
        return operator(*args, **kwargs)


def _may_cast(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _cast_lower(operator: torch._ops.OpOverload, to: torch.dtype, /, *args: Any, **kwargs: Any) -> Any:
    return _call_without_autocast(operator, to, args, kwargs)


def _cast_float32(operator: torch._ops.OpOverload, to: torch.dtype, /, *args: Any, **kwargs: Any) -> Any:
    return _call_without_autocast(operator, torch.float32, args, kwargs)


def _float32_result(operator: torch._ops.OpOverload, to: torch.dtype, /, *args: Any, **kwargs: Any) -> Any:
    """With a result of float32 where none is asked for, whatever comes in."""
    names = [argument.name for argument in operator._schema.arguments]
    if _may_cast(args[0]) and dict(zip(names, args, strict=False)).get("dtype", kwargs.get("dtype")) is None:
        place = names.index("dtype")
        args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
    return _call_without_autocast(operator, None, args, kwargs)


def _float32_norm(operator: torch._ops.OpOverload, to: torch.dtype, /, *args: Any, **kwargs: Any) -> Any:
    """The overload that takes the type of the result: float32, or that of a tensor which is not cast."""
    result = torch.float32 if _may_cast(args[0]) else args[0].dtype
    other = torch.ops.aten.norm.ScalarOpt_dtype
    if operator is torch.ops.aten.norm.ScalarOpt_dim:
        other = torch.ops.aten.norm.ScalarOpt_dim_dtype
    return _call_without_autocast(other, None, args, {**kwargs, "dtype": result})


def _cast_widest(operator: torch._ops.OpOverload, to: torch.dtype, /, *args: Any, **kwargs: Any) -> Any:
    given = [value.dtype for value in pytree.tree_leaves((args, kwargs)) if _may_cast(value)]
    return _call_without_autocast(operator, torch.float32 if torch.float32 in given else to, args, kwargs)


def _refuse(operator: torch._ops.OpOverload, to: torch.dtype, /, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy is unsafe under autocast and refused on CUDA: use binary_cross_entropy_with_logits, "
        "or leave autocast for it"
    )


_CAST_FUNCTIONS = {
    "lower": _cast_lower,
    "float": _cast_float32,
    "float result": _float32_result,
    "float norm": _float32_norm,
    "widest": _cast_widest,
    "refused": _refuse,
}


@dataclass(frozen=True)
class AutocastSpec:
    """Under which autocast, if any, the stages run, and where; here everything lies on CPU."""

    device: str
    dtype: torch.dtype | None

    def entered(self) -> AbstractContextManager:
        if self.dtype is None:
            return nullcontext()
        return cuda_autocast(self.dtype) if self.device == "cuda" else torch.autocast("cpu", dtype=self.dtype)
