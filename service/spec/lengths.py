"""LengthsSection: `data.lengths` of a job whose samples have unequal lengths, and checks of what else the job may have then.

Values only. How samples are grouped and padded is in worker/data/padding.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from service.spec.values import SpecPart, Text

MAX_BUCKETS = 8
IMPLIED_REDUCTION = "tokens"
"""training.loss_reduction of a job with data.lengths."""


def _check_buckets(value: object) -> object:
    """Ascending lengths, or auto."""
    if value == "auto":
        return value
    if not isinstance(value, list) or not value or len(value) > MAX_BUCKETS:
        raise ValueError(
            f"is {str(value)[:100]!r}: write auto, or 1 to {MAX_BUCKETS} lengths such as [64, 128, 256]"
        )
    if any(not isinstance(one, int) or isinstance(one, bool) or one < 1 for one in value) or value != sorted(
        {*value}
    ):
        raise ValueError(f"is {value}: write lengths in ascending order, such as [64, 128, 256]")
    return value


class LengthsSection(SpecPart):
    """Padding of samples of unequal lengths: each microbatch to the smallest bucket (rows and length) that holds it."""

    field: Text | None = Field(
        default=None,
        description="The integer input of shape (length,) whose length counts; null: the first input, or input_ids",
    )
    buckets: Annotated[Literal["auto"] | list[int], BeforeValidator(_check_buckets)] = Field(
        default="auto",
        description="Lengths of buckets in ascending order, the last one for the longest sample; auto: up to eight, by the "
        "lengths of all samples, which a stream does not tell",
    )
    pad: Annotated[int, Field(ge=-(2**31), lt=2**31)] = Field(
        default=0,
        description="Value behind the end of `field`; other inputs get 0, targets the integer that the loss ignores",
    )


def check_padded(
    *,
    loss: str | None,
    loss_reduction: str,
    tensor: int,
    heterogeneous: bool,
    device: str,
    options: Mapping[str, bool],
) -> None:
    """ValueError, naming field, value and remedy, for what a job with data.lengths cannot have. `options` are switches of
    `training` that it leaves out."""
    if loss is None:
        raise ValueError(
            "data.lengths weighs microbatches by their targets, and the model's own loss tells none to count: give `loss`, "
            "and the model's logits in model.output"
        )
    if loss_reduction != IMPLIED_REDUCTION:
        raise ValueError(
            f"training.loss_reduction is {loss_reduction}, and with data.lengths microbatches have unequal numbers of "
            f"targets: write {IMPLIED_REDUCTION}, or leave it out"
        )
    if heterogeneous:
        raise ValueError(
            "data.lengths is given and resources.meshes lists meshes that differ, between which tensors of one length are "
            "resharded: give all meshes the same size, or leave data.lengths out and pad every sample to one length"
        )
    if tensor > 1:
        raise ValueError(
            f"data.lengths is given and parallelism.tp is {tensor}, which splits the stages of one length only: set tp to "
            "1, or leave data.lengths out and pad every sample to one length"
        )
    if device == "cuda":
        raise ValueError(
            "data.lengths is given and resources.device is cuda, where kernels are loaded for one length only: train on "
            "cpu, or leave data.lengths out and pad every sample to one length"
        )
    for name, given in options.items():
        if given:
            raise ValueError(
                f"data.lengths is given and training.{name} is true, which knows stages of one length only: leave out one "
                "of them"
            )


def check_evaluated_lengths(lengths: LengthsSection | None, evaluated: LengthsSection) -> None:
    """ValueError for evaluation.data.lengths of another length than the largest of training, whose stages evaluate."""
    if evaluated.buckets == "auto" or len(evaluated.buckets) > 1:
        raise ValueError(
            f"evaluation.data.lengths.buckets is {evaluated.buckets}, and evaluation runs stages of one length, the "
            "largest of training: write that one, such as [256]"
        )
    if lengths is None:
        raise ValueError(
            "evaluation.data.lengths is given and data.lengths is not, and microbatches of unequal numbers of targets would "
            "weigh alike: give data.lengths, or leave evaluation.data.lengths out"
        )
    if lengths.buckets != "auto" and evaluated.buckets != lengths.buckets[-1:]:
        raise ValueError(
            f"evaluation.data.lengths.buckets is {evaluated.buckets}, and the largest of data.lengths.buckets is "
            f"{lengths.buckets[-1]}, whose stages evaluate: write [{lengths.buckets[-1]}]"
        )
