"""In what numbers a job computes. Values only, as jobspec.py, of which it is a part."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class LossScaling(BaseModel):
    """How losses are scaled in fp16, in the words of torch.amp.GradScaler."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    init_scale: Annotated[float, Field(gt=0, le=2.0**100, allow_inf_nan=False)] = 2.0**16
    growth_factor: Annotated[float, Field(gt=1, le=2.0**16, allow_inf_nan=False)] = 2.0
    backoff_factor: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.5
    growth_interval: Annotated[int, Field(ge=1, le=1_000_000_000)] = Field(
        default=2000, description="Steps without overflow after which the scale grows"
    )
    max_skipped_steps: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=24, description="After so many steps in a row that overflow the job fails"
    )


class Precision(BaseModel):
    """A part of `training`."""

    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32",
        description="fp32: each module in its own type; bf16, fp16: by autocast, fp16 with loss scaling",
    )
    loss_scaling: LossScaling | None = Field(
        default=None, description="Of precision fp16; null: as torch.amp.GradScaler scales by default"
    )
    sync_batch_norm: bool = Field(
        default=False,
        description="BatchNorm normalises by the rows of all workers of a mesh, not by each worker's own",
    )
    tf32: bool | None = Field(
        default=None,
        description="Whether products of fp32 numbers may round to TF32 on CUDA; null: as torch does by default (matrix "
        "products do not, cuDNN's convolutions do)",
    )
    compile: bool = Field(
        default=False,
        description="Every stage's forward and backward by torch.compile, before the first step; a stage that cannot be "
        "compiled runs as traced, and an event says why",
    )
    compile_limit_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = Field(
        default=300.0,
        description="What a worker takes for compiling at most, in seconds: once for the layers that it measures, and "
        "once for its stages; what is left then runs as traced",
    )

    @model_validator(mode="after")
    def _only_fp16_scales(self) -> Self:
        if self.loss_scaling is not None and self.precision != "fp16":
            raise ValueError(
                f"training.loss_scaling is given and training.precision is {self.precision}, which scales no loss: "
                "leave it out, or set precision to fp16"
            )
        return self
