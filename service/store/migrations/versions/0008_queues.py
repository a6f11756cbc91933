"""Labels, limits of time, and attempts that are asked to end; indexes for what lists are filtered by"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
_INDEXES = ("state", "queue", "name")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("labels", sa.JSON(), nullable=True))
    op.add_column("jobs", sa.Column("max_duration_s", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("held_s", sa.Double(), nullable=False, server_default="0"))
    op.add_column("attempts", sa.Column("end_asked_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("attempts", sa.Column("end_asked_for", sa.String(100), nullable=True))
    op.create_table(
        "job_labels",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("value", sa.String(63), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "name", name="pk_job_labels"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_labels_job_id_jobs"),
    )
    op.create_index("ix_job_labels_name_value", "job_labels", ["name", "value", "job_id"])
    for column in _INDEXES:
        op.create_index(f"ix_jobs_{column}_created", "jobs", [column, "created_at", "id"])


def downgrade() -> None:
    for column in _INDEXES:
        op.drop_index(f"ix_jobs_{column}_created", "jobs")
    op.drop_table("job_labels")
    for column in ("end_asked_for", "end_asked_at"):
        op.drop_column("attempts", column)
    for column in ("held_s", "max_duration_s", "labels"):
        op.drop_column("jobs", column)
