"""The settings that say how long, and how much, is kept; a part of service/settings.py."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings

MEBIBYTE = 1 << 20
FOR_EVER = -1
Days = Annotated[float, Field(ge=-1, le=100_000, allow_inf_nan=False)]


class Keeping(BaseSettings):
    """In days -1 is for ever. Jobs, attempts and events always stay."""

    keep_timelines_days: Days = Field(default=30.0, description="Measured slots, after their job's end")
    keep_history_days: Days = Field(default=365.0, description="Steps, plan and logs, after their job's end")
    keep_packages_days: Days = Field(
        default=30.0, description="Uploaded code that no job names, after its last upload"
    )
    keep_checkpoints_days: Days = Field(
        default=-1.0, description="Checkpoints and exports, after their job's end; the cluster deletes them"
    )
    removal_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=600.0, description="So long the cluster may take to delete checkpoints"
    )
    keep_plans_days: Days = Field(
        default=90.0, description="Plans kept under a name, after the last job was submitted with them"
    )
    named_plans: Annotated[int, Field(ge=0, le=100_000)] = Field(
        default=100, description="Plans that one owner may keep under names"
    )
    named_plan_limit_bytes: Annotated[int, Field(ge=1024)] = Field(
        default=32 * MEBIBYTE, description="A plan that is kept under a name"
    )

    @field_validator(
        "keep_timelines_days",
        "keep_history_days",
        "keep_packages_days",
        "keep_plans_days",
        "keep_checkpoints_days",
    )
    @classmethod
    def _days_or_for_ever(cls, value: float) -> float:
        if -1 < value < 0:
            raise ValueError(f"{value:g} is no time to keep something: give days, or -1 for ever")
        return value
