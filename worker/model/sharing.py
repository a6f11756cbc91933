"""How the workers of a mesh share a tensor of a microbatch: which dimension its samples lie along.

Nothing marks that dimension: it is the one that grows with the number of samples a worker has, seen by the shapes that
workers of meshes of unlike sizes trace. Shapes only, light: no torch. Whether the values are shared as the shapes say
is looked at by worker/model/share_check.py.
"""

from __future__ import annotations

from worker.model.errors import CutError

Shape = tuple[int, ...]


def shared_dimension(
    tensor: str, shapes: tuple[Shape, Shape], sizes: tuple[int, int], *, differentiable: bool
) -> int | None:
    """The dimension along which the workers of two meshes of unlike `sizes` share a tensor of which each of theirs has
    `shapes`; None where every worker has the whole.

    Raises CutError, naming the tensor, where its shapes do not tell, or where all have it and its gradient would have to
    be summed on the way.
    """
    (one, other), (a, b) = shapes, sizes
    if len(one) == len(other):
        if one == other and not differentiable:
            return None
        grown = [d for d, (x, y) in enumerate(zip(one, other, strict=True)) if x != y]
        if len(grown) == 1 and one[grown[0]] * a == other[grown[0]] * b:
            return grown[0]
    why = (
        "every worker has the whole of it, and its gradient is a sum over workers"
        if one == other
        else "no single dimension is shared among them"
    )
    raise CutError(
        f"tensor {tensor!r} cannot go between a mesh of {a} workers, of which each has {list(one)}, and one of {b} with "
        f"{list(other)} each: {why}; give both meshes the same number of workers, or keep the stages that make and use it "
        "on one mesh (pipeline.cut)"
    )


def whole_shape(shape: Shape, dimension: int | None, workers: int) -> Shape:
    """The shape of the whole tensor of which each of so many workers has `shape`."""
    if dimension is None:
        return shape
    return (*shape[:dimension], shape[dimension] * workers, *shape[dimension + 1 :])
