"""What is to be told to others: one row for each state of a job and each URL that wants to know, and how that went."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from service.store.tables import Base


class DeliveryState(StrEnum):
    PENDING = "PENDING"
    DELIVERED = "DELIVERED"
    GIVEN_UP = "GIVEN_UP"


class Delivery(Base):
    __tablename__ = "deliveries"
    __table_args__ = (
        Index("ix_deliveries_due", "state", "next_at"),
        Index("ix_deliveries_job", "job_id", "event"),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    event: Mapped[int]
    """The number of the job's event that it tells."""
    job_state: Mapped[str] = mapped_column(String(20))
    url: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(String(300))
    secret: Mapped[str | None] = mapped_column(String(128))
    """The name of the owner's secret that signs it; null: the operator's."""
    body: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(20), default=DeliveryState.PENDING)
    tries: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[datetime]
    next_at: Mapped[datetime]
    """When it is due; while it is on its way, when another process takes it for lost and tries again."""
    last_at: Mapped[datetime | None]
    status: Mapped[int | None]
    """What the receiver answered last."""
    error: Mapped[str | None] = mapped_column(Text)
