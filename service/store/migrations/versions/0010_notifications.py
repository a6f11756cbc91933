"""Whom jobs tell of their states, and how that went"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("notifications", sa.JSON(), nullable=True))
    op.create_table(
        "deliveries",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("event", sa.Integer(), nullable=False),
        sa.Column("job_state", sa.String(20), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("host", sa.String(300), nullable=False),
        sa.Column("secret", sa.String(128), nullable=True),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("next_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_deliveries"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_deliveries_job_id_jobs"),
    )
    op.create_index("ix_deliveries_due", "deliveries", ["state", "next_at"])
    op.create_index("ix_deliveries_job", "deliveries", ["job_id", "event"])


def downgrade() -> None:
    op.drop_table("deliveries")
    op.drop_column("jobs", "notifications")
