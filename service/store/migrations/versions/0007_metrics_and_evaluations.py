"""Metrics that losses return, evaluations, and the best checkpoint by one of them"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
_NEW = (("jobs", "metrics"), ("jobs", "best_checkpoint"), ("steps", "metrics"))


def upgrade() -> None:
    for table, name in _NEW:
        op.add_column(table, sa.Column(name, sa.JSON(), nullable=True))
    op.create_table(
        "evaluations",
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=True),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("evaluation_s", sa.Double(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_evaluations_job_id"),
        sa.PrimaryKeyConstraint("job_id", "step", name="pk_evaluations"),
    )


def downgrade() -> None:
    op.drop_table("evaluations")
    for table, name in _NEW:  # not in a batch: that would drop the table that others point to
        op.drop_column(table, name)
