"""Gradient buckets: places a REDUCE behind the last B or W of its parameters, on a lane beside the backwards.

The program's own REDUCE waits for the last bucket and does the rest: parameters tied across meshes, and the norm
over all meshes. The scheduler puts buckets into plans by the layer profile, the engine into what runs by the
parameters. Deadlock-free: all ranks of a mesh have one program, hence the same buckets in the same order, on a
lane whose only other collectives come after them; a bucket waits only for actions of its own mesh and for
transfers planned before it; no compute action and no transfer waits for a bucket. Pure; must not know tensors.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from worker.contract.program import Instruction, Program

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
class BucketedProgram:
    """A program with buckets; `buckets[i]` has the names of the parameters of instruction i, `source[i]` the
    instruction of the given program that it is (None: a bucket)."""

    program: Program
    buckets: Mapping[int, tuple[str, ...]]
    source: tuple[int | None, ...]


def with_buckets(
    program: Program, gradients: Sequence[Gradient], limit_bytes: int = BUCKET_BYTES
) -> BucketedProgram:
    """`program` with a REDUCE for each bucket of `gradients`; as it is where there is none, or no final REDUCE.

    Buckets that a plan has put there are replaced: the k-th of a stage takes the place of the k-th planned one, is that
    instruction (`source`), stands where it stands and waits for what it waits for.
    """
    planned: dict[int | None, list[int]] = {}
    for index, one in enumerate(program):
        if is_bucket(one):
            planned.setdefault(one.stage, []).append(index)
    dropped = {program[k].record for found in planned.values() for k in found} - {None}
    kept = [index for index, one in enumerate(program) if not is_bucket(one)]
    base = [replace(program[k], wait=tuple(e for e in program[k].wait if e not in dropped)) for k in kept]
    last = {i.stage: index for index, i in enumerate(base) if i.op in ("B", "W")}
    ready: dict[int, list[Gradient]] = {}
    for gradient in gradients:
        made = [last[stage] for stage in gradient.stages if stage in last]
        if made:
            ready.setdefault(max(made), []).append(gradient)
    final = next((index for index, i in enumerate(base) if i.op == "REDUCE"), None)
    if final is None or not ready:
        return BucketedProgram(tuple(base) if planned else program, {}, tuple(kept))
    free = 1 + max((i.record for i in program if i.record is not None), default=-1)
    end, places = free, []
    for index in sorted(ready):
        if base[index].record is None:
            free += 1
            base[index] = replace(base[index], record=free)
        own = planned.get(base[index].stage, [])
        for names in group_into_buckets(ready[index], limit_bytes):
            place = own.pop(0) if own else None
            at = index + 1 if place is None else max(index + 1, bisect.bisect_left(kept, place))
            places.append((at, index, place, names))
    places.sort(key=lambda one: one[0])
    base[final] = replace(base[final], wait=(*base[final].wait, end))
    out: list[Instruction] = []
    source: list[int | None] = []
    buckets: dict[int, tuple[str, ...]] = {}
    for index, instruction in enumerate(base):
        while places and places[0][0] == index:
            _, behind, place, names = places.pop(0)
            waits = {base[behind].record, *(() if place is None else program[place].wait)}
            buckets[len(out)] = names
            out.append(
                Instruction("REDUCE", REDUCE_LANE, stage=base[behind].stage, wait=tuple(sorted(waits)))
            )
            source.append(place)
        if index == final:
            out[max(buckets)] = replace(out[max(buckets)], record=end)
        out.append(instruction)
        source.append(kept[index])
    return BucketedProgram(tuple(out), buckets, tuple(source))


def is_bucket(instruction: Instruction) -> bool:
    """True for the REDUCE of a bucket, false for the final REDUCE of everything left."""
    return instruction.op == "REDUCE" and instruction.lane == REDUCE_LANE


def group_into_buckets(
    gradients: Sequence[Gradient], limit_bytes: int = BUCKET_BYTES
) -> list[tuple[str, ...]]:
    """Names in their order, as few lists as hold no more than the limit each, or one gradient."""
    found: list[list[Gradient]] = []
    for gradient in sorted(gradients, key=lambda one: one.kind):
        open_bucket = found[-1] if found else []
        held = sum(one.size_bytes for one in open_bucket) + gradient.size_bytes
        if open_bucket and open_bucket[-1].kind == gradient.kind and held <= limit_bytes:
            open_bucket.append(gradient)
        else:
            found.append([gradient])
    return [tuple(one.name for one in bucket) for bucket in found]
