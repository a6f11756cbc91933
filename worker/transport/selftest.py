"""Transport self-test: known values over every new connection, before a step relies on it.

Two GPUs whose direct copies are wrong (an IOMMU between them, a broken bridge), a connection between the wrong
two, a sum that leaves a rank out: each would otherwise train without an error. Short and long tensors,
as NCCL moves them differently; sums are exact in every type. Knows transports that enqueue on the current
stream; nothing of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from worker.transport.base import ConnectError, Transport, finish, real_view

# Short ones go another way through NCCL than long ones do.
SHORT, LONG = 5, (1 << 17) + 3
SUMMED_DTYPES = (
    torch.uint8,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int32,
    torch.int64,
)
_HINT = (
    "the GPUs or NCCL move wrong values: look at `nvidia-smi topo -m`, at the IOMMU (ACS) of the host, and whether it is "
    "right with NCCL_P2P_DISABLE=1, or with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
)


@dataclass(frozen=True)
class SelfTest:
    """A transfer or sum of known values: `start` enqueues it, then `got` must equal `expected`; `what` is its name."""

    what: str
    start: Callable[[], None]
    got: torch.Tensor
    expected: torch.Tensor

    def check(self, name: str) -> None:
        """ConnectError where other values came; `name` is this worker."""
        got = self.got.to("cpu")
        if torch.equal(got, self.expected):
            return
        at = int((got != self.expected).nonzero()[0])
        raise ConnectError(
            f"{name}: {self.what} of {got.numel()} {str(got.dtype).removeprefix('torch.')} gave {got[at].item()} at "
            f"{at}, where {self.expected[at].item()} is right; {_HINT}"
        )


def lane_selftests(
    transport: Transport, source: str, target: str, ranks: tuple[int, int], rank: int, device: str
):
    """Tests of the lane from `source` to `target`: each end has its half."""
    trials = []
    for size in (SHORT, LONG):
        sent = _pattern(size, ranks)
        here = torch.zeros(size, dtype=torch.uint8, device=device)
        if rank == ranks[0]:
            here = sent.to(device)
            start = _deferred(transport.send, target, 0, here)
        else:
            start = _deferred(transport.receive, source, 0, here)
        trials.append(SelfTest(f"what goes from {source} to {target}", start, here, sent))
    return trials


def group_selftests(
    transport: Transport, group: str, ranks: Sequence[int], rank: int, device: str
) -> list[SelfTest]:
    """Tests of a group: sums of every dtype, a reduce-scatter and an all-gather. Element k of a sum comes from one worker,
    each in turn: sums are exact in every dtype, and a rank that is left out leaves zeros."""
    own, count = list(ranks).index(rank), len(ranks)
    trials = []

    def turn(size: int, dtype: torch.dtype, of: int) -> torch.Tensor:
        places = torch.arange(size)
        return torch.where(places % count == of, places % 5 + 1, 0).to(dtype)

    for size, dtype in [(SHORT * count, dtype) for dtype in SUMMED_DTYPES] + [(LONG, torch.float32)]:
        here = turn(size, dtype, own).to(device)
        whole = (torch.arange(size) % 5 + 1).to(dtype)
        start = _deferred(transport.all_reduce, group, here)
        trials.append(SelfTest(f"the all-reduce over {group}", start, here, whole))
    for size in (SHORT, LONG):
        whole = (torch.arange(size * count) % 5 + 1).float()
        part = torch.zeros(size, device=device)
        given = turn(size * count, torch.float32, own).to(device)
        start = _deferred(transport.start_reduce_scatter, group, part, given)
        trials.append(
            SelfTest(f"the reduce-scatter over {group}", start, part, whole[own * size : (own + 1) * size])
        )
        gathered = torch.zeros(size * count, device=device)
        given = whole[own * size : (own + 1) * size].to(device)
        start = _deferred(transport.start_all_gather, group, gathered, given)
        trials.append(SelfTest(f"the all-gather over {group}", start, gathered, whole))
    return trials


def collective_selftest(
    transport: Transport,
    group: str,
    operation: str,
    dtype: torch.dtype,
    *,
    size_bytes: int,
    index: int,
    ranks: int,
    device: torch.device | str,
) -> SelfTest:
    """Test of one collective as a step has it: `size_bytes` are those of the whole tensor, `index` is the place of this
    worker among the `ranks` of the group. Ones are summed, and numbers of ranks are gathered."""
    whole = torch.ones(size_bytes // dtype.itemsize, dtype=dtype, device=device)
    part = whole.numel() // ranks
    what = f"the {operation} over {group}"

    def run(start: Callable[..., Callable[[], None] | None], *tensors: torch.Tensor) -> Callable[[], None]:
        return lambda: finish(start(group, *map(real_view, tensors)))

    if operation == "all-reduce":
        return SelfTest(
            what, run(transport.start_all_reduce, whole), whole, whole.to("cpu", copy=True).mul_(ranks)
        )
    if operation == "reduce-scatter":
        own = torch.zeros(part, dtype=dtype, device=device)
        summed = torch.full((part,), ranks, dtype=dtype)
        return SelfTest(what, run(transport.start_reduce_scatter, own, whole), own, summed)
    if operation != "all-gather":
        raise ValueError(f"{operation!r} is no collective: all-reduce, reduce-scatter or all-gather")
    numbers = (torch.arange(ranks) % 5 + 1).to(dtype)
    given = numbers[index].to(device).repeat(part)
    return SelfTest(
        what, run(transport.start_all_gather, whole, given), whole, numbers.repeat_interleave(part)
    )


def exchange_selftests(
    transport: Transport, group: str, pairs: Sequence[tuple[str, str]], own_name: str, device: str
) -> list[SelfTest]:
    """Tests of all pairs of workers that exchange messages in a group, at once."""
    trials = []
    numbers: Mapping[str, int] = {name: k for k, name in enumerate(sorted({*sum(pairs, ())}))}
    for size in (SHORT, LONG):
        sends, receives, halves = [], [], []
        for source, target in pairs:
            sent = _pattern(size, (numbers[source], numbers[target]))
            if source == own_name:
                sends.append((target, sent.to(device)))
            elif target == own_name:
                here = torch.zeros(size, dtype=torch.uint8, device=device)
                receives.append((source, here))
                halves.append((f"what goes from {source} to {target} in {group}", here, sent))
        if not sends and not receives:
            continue
        start = _deferred(transport.exchange, group, sends, receives)
        nothing = torch.zeros(0)
        trials.append(SelfTest(f"the exchange in {group}", start, nothing, nothing))
        trials += [SelfTest(what, _already_started, here, sent) for what, here, sent in halves]
    return trials


def _pattern(size: int, ranks: tuple[int, int]) -> torch.Tensor:
    """Bytes that no other pair of ranks sends; none is 0, the value of fresh memory."""
    first = 1 + (ranks[0] * 37 + ranks[1] * 91) % 250
    return ((torch.arange(size) * 7 + first) % 251 + 1).to(torch.uint8)


def _deferred(call: Callable[..., object], *arguments: object) -> Callable[[], None]:
    return lambda: call(*arguments) and None


def _already_started() -> None:
    """A start that moves nothing: the exchange of another test has started this one."""
