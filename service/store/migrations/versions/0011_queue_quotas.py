"""Quotas of queues that operators set"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table(
        "queue_quotas",
        sa.Column("queue", sa.String(100), nullable=False),
        sa.Column("quota", sa.Integer(), nullable=True),
        sa.Column("set_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("queue", name="pk_queue_quotas"),
    )


def downgrade() -> None:
    op.drop_table("queue_quotas")
