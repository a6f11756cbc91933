"""What the API answers about notifications. Values only, for the routes and for service.client alike."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field


class DeliveryView(BaseModel):
    """One state of a job that one URL is told; `id` is the `webhook-id` that the receiver sees, in every try."""

    id: str
    job_id: str
    event: int = Field(description="The number of the job's event that it tells")
    job_state: str
    url: str
    secret: str | None = Field(description="The name of the secret that signs it; null: the operator's")
    state: Literal["PENDING", "DELIVERED", "GIVEN_UP"]
    tries: int
    created_at: datetime
    next_at: datetime | None = Field(description="When it is tried next; null where it is not")
    last_at: datetime | None
    status: int | None = Field(description="What the receiver answered last")
    error: str | None


class DeliveryPage(BaseModel):
    items: list[DeliveryView]
    next_page_token: str | None
