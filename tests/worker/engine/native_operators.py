"""Operators with weights under I and W, in a process of its own: torch's kernels may die in native code.

`python -m tests.worker.engine.native_operators` names each case before it runs, and says `done` after the last; a
case whose gradients differ from those of one backward raises.
"""

from __future__ import annotations

import faulthandler
import itertools

import torch
from torch.nn import functional

from worker.engine.autograd import backward, backward_input

IMAGE, VOLUME, ROW = (3, 8, 6, 6), (2, 8, 3, 4, 4), (3, 8, 6)


def _zeros(*shape):
    return torch.zeros(*shape), torch.ones(*shape)


# the shape of the input, those of the parameters, and the operator
OPERATORS = {
    "group_norm": (IMAGE, [(8,), (8,)], lambda x, w, b: functional.group_norm(x, 4, w, b)),
    "group_norm of a volume": (VOLUME, [(8,), (8,)], lambda x, w, b: functional.group_norm(x, 4, w, b)),
    "group_norm of a row": (ROW, [(8,), (8,)], lambda x, w, b: functional.group_norm(x, 4, w, b)),
    "group_norm, no bias": (IMAGE, [(8,)], lambda x, w: functional.group_norm(x, 4, w)),
    "two group_norms": (
        IMAGE,
        [(8,), (8,)],
        lambda x, w, b: functional.group_norm(functional.group_norm(x, 4, w, b).sin(), 2, w, b),
    ),
    "layer_norm": (IMAGE, [(6, 6), (6, 6)], lambda x, w, b: functional.layer_norm(x, (6, 6), w, b)),
    "layer_norm of channels": (
        IMAGE,
        [(8,), (8,)],
        lambda x, w, b: functional.layer_norm(x.permute(0, 2, 3, 1), (8,), w, b),
    ),
    "rms_norm": (IMAGE, [(6,)], lambda x, w: functional.rms_norm(x, (6,), w)),
    "batch_norm": (IMAGE, [(8,), (8,)], lambda x, w, b: functional.batch_norm(x, *_zeros(8), w, b, True)),
    "batch_norm of a volume": (
        VOLUME,
        [(8,), (8,)],
        lambda x, w, b: functional.batch_norm(x, *_zeros(8), w, b, True),
    ),
    "batch_norm, evaluating": (
        IMAGE,
        [(8,), (8,)],
        lambda x, w, b: functional.batch_norm(x, *_zeros(8), w, b),
    ),
    "instance_norm": (IMAGE, [(8,), (8,)], lambda x, w, b: functional.instance_norm(x, None, None, w, b)),
    "conv1d": (ROW, [(8, 8, 3), (8,)], lambda x, w, b: functional.conv1d(x, w, b, padding=1)),
    "conv2d": (IMAGE, [(8, 8, 3, 3), (8,)], lambda x, w, b: functional.conv2d(x, w, b, padding=1)),
    "conv2d of one pixel": (IMAGE, [(8, 8, 1, 1), (8,)], functional.conv2d),
    "conv2d by channel": (IMAGE, [(8, 1, 3, 3), (8,)], lambda x, w, b: functional.conv2d(x, w, b, groups=8)),
    "conv2d with a stride": (
        IMAGE,
        [(8, 8, 3, 3), (8,)],
        lambda x, w, b: functional.conv2d(x, w, b, stride=2),
    ),
    "conv3d": (VOLUME, [(8, 8, 3, 3, 3), (8,)], lambda x, w, b: functional.conv3d(x, w, b, padding=1)),
    "conv_transpose2d": (
        IMAGE,
        [(8, 8, 2, 2), (8,)],
        lambda x, w, b: functional.conv_transpose2d(x, w, b, stride=2),
    ),
    "conv_transpose3d": (VOLUME, [(8, 8, 2, 2, 2), (8,)], functional.conv_transpose3d),
    "prelu": (IMAGE, [(8,)], functional.prelu),
    "linear": (IMAGE, [(5, 6), (5,)], functional.linear),
    "bilinear": (IMAGE, [(5, 6, 6), (5,)], lambda x, w, b: functional.bilinear(x, x * 2, w, b)),
    "scale of a channel": (IMAGE, [(8, 1, 1)], lambda x, w: functional.interpolate(x * w, scale_factor=2.0)),
    "attention with a bias": (
        IMAGE,
        [(1, 8, 6, 6)],
        lambda x, w: functional.scaled_dot_product_attention(x, x, x, attn_mask=w),
    ),
    "grid_sample": (
        IMAGE,
        [(3, 6, 6, 2)],
        lambda x, w: functional.grid_sample(x, w.tanh(), align_corners=False),
    ),
    "weight_norm": (
        IMAGE,
        [(8, 8, 3, 3), (8, 1, 1, 1)],
        lambda x, v, g: functional.conv2d(x, torch._weight_norm(v, g, 0)),
    ),
}
LAYOUTS = ("contiguous", "channels last", "transposed")


def laid_out(tensor, layout):
    if layout == "transposed":
        return tensor.transpose(1, -1).contiguous().transpose(1, -1)
    if layout == "channels last" and tensor.dim() in (4, 5):
        last = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
        return tensor.contiguous(memory_format=last)
    return tensor.contiguous()


def compare(shape, parameter_shapes, operator, layout, gradient_layout, autocast):
    """AssertionError unless I and W give what one backward gives."""
    torch.manual_seed(0)
    x = laid_out(torch.randn(shape), layout).requires_grad_()
    parameters = [torch.randn(one).requires_grad_() for one in parameter_shapes]

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            return operator(x, *parameters)

    made = forward()
    gradient = laid_out(torch.randn(made.shape), gradient_layout).to(made.dtype)
    whole = backward([made], [gradient], [x]) + [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    found, rest = backward_input([forward()], [gradient], [x])
    rest.run()
    torch.testing.assert_close([*found, *(p.grad for p in parameters)], whole, rtol=1e-4, atol=1e-5)


def main():
    faulthandler.enable()
    torch.set_num_threads(1)
    for name, (shape, parameters, operator) in OPERATORS.items():
        for layout, gradient_layout, autocast in itertools.product(LAYOUTS, LAYOUTS, (False, True)):
            print(f"{name}, {layout}, gradient {gradient_layout}, autocast {autocast}", flush=True)
            compare(shape, parameters, operator, layout, gradient_layout, autocast)
    print("done", flush=True)


if __name__ == "__main__":
    main()
