"""Which gradients the workers of a mesh sum together, and when: buckets, on a lane of their own, beside the backwards.

A bucket is a REDUCE behind the last B or W of its parameters; the program's own REDUCE waits for the last bucket and
does the rest: tied parameters of other meshes, and the norm over all meshes. Pure; must not know tensors.

It cannot deadlock: all workers of a mesh have one program and thus the same buckets in the same order, on a lane whose
only other collectives come after them; a bucket waits for actions of its own mesh only; and no compute action and no
transfer waits for a bucket, so whatever a bucket of another worker still needs goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from worker.program import Instruction, Program

REDUCE_LANE = "reduce"
# A bucket is copied together, beyond what is planned: this bounds the copy. Torch's own choice for its buckets.
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class Gradient:
    """A gradient to be summed: `stages` of this mesh make it; only those of one `kind` (dtype) share a bucket."""

    name: str
    stages: tuple[int, ...]
    size_bytes: int
    kind: str


@dataclass(frozen=True)
class Bucketed:
    """A program with buckets; `buckets[i]` has the names of the parameters of instruction i, `source[i]` the
    instruction of the given program that it is (None: a bucket)."""

    program: Program
    buckets: Mapping[int, tuple[str, ...]]
    source: tuple[int | None, ...]


def with_buckets(
    program: Program, gradients: Sequence[Gradient], limit_bytes: int = BUCKET_BYTES
) -> Bucketed:
    """`program` with a REDUCE for each bucket of `gradients`; as it is where there is none, or no final REDUCE."""
    last = {i.stage: index for index, i in enumerate(program) if i.op in ("B", "W")}
    ready: dict[int, list[Gradient]] = {}
    for gradient in gradients:
        made = [last[stage] for stage in gradient.stages if stage in last]
        if made:
            ready.setdefault(max(made), []).append(gradient)
    final = next((index for index, i in enumerate(program) if i.op == "REDUCE"), None)
    if final is None or not ready:
        return Bucketed(program, {}, tuple(range(len(program))))
    free = 1 + max((i.record for i in program if i.record is not None), default=-1)
    out: list[Instruction] = []
    source: list[int | None] = []
    buckets: dict[int, tuple[str, ...]] = {}
    end = free
    for index, instruction in enumerate(program):
        if index == final:
            out[max(buckets)] = replace(out[max(buckets)], record=end)
            instruction = replace(instruction, wait=(*instruction.wait, end))
        if index in ready and instruction.record is None:
            free += 1
            instruction = replace(instruction, record=free)
        out.append(instruction)
        source.append(index)
        for names in _split(ready.get(index, ()), limit_bytes):
            buckets[len(out)] = names
            out.append(
                Instruction("REDUCE", REDUCE_LANE, stage=instruction.stage, wait=(instruction.record,))
            )
            source.append(None)
    return Bucketed(tuple(out), buckets, tuple(source))


def _split(gradients: Sequence[Gradient], limit_bytes: int) -> list[tuple[str, ...]]:
    """In their order, as few as hold no more than the limit each, or one gradient."""
    found: list[list[Gradient]] = []
    for gradient in sorted(gradients, key=lambda one: one.kind):
        open_bucket = found[-1] if found else []
        held = sum(one.size_bytes for one in open_bucket) + gradient.size_bytes
        if open_bucket and open_bucket[-1].kind == gradient.kind and held <= limit_bytes:
            open_bucket.append(gradient)
        else:
            found.append([gradient])
    return [tuple(one.name for one in bucket) for bucket in found]
