"""When and by which number a job is evaluated between its steps. Values only, as jobspec.py, of which it is a part."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

METRIC_PATTERN = r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$"
_Count = Annotated[int, Field(ge=1, le=1_000_000)]


class EvaluationPolicy(BaseModel):
    """All but the data."""

    every_steps: Annotated[int, Field(ge=1, le=1_000_000_000)] = Field(
        default=100, description="Evaluate after every so many steps, and after the last"
    )
    steps: _Count | None = Field(
        default=None, description="Batches of training.global_batch samples; null: all of the data"
    )
    at_start: bool = Field(default=False, description="Also before the first step")
    metric: Annotated[str, Field(pattern=METRIC_PATTERN)] = Field(
        default="loss",
        description="What keep_best and patience go by: loss, or a metric that the loss returns",
    )
    mode: Literal["min", "max"] | None = Field(
        default=None, description="Whether less or more of the metric is better; null: less of the loss"
    )
    keep_best: bool = Field(
        default=False,
        description="Keep the best checkpoint beside the newest; it is taken when it is found, due or not",
    )
    patience: _Count | None = Field(
        default=None, description="End the job when so many evaluations one after the other are no better"
    )

    @model_validator(mode="after")
    def _better_is_known(self) -> Self:
        if self.metric != "loss" and self.mode is None and (self.keep_best or self.patience is not None):
            raise ValueError(
                f"evaluation.metric is {self.metric!r}, and nothing says whether less or more of it is better: "
                "set evaluation.mode to min or max"
            )
        return self
