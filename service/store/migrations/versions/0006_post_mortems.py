"""What failed attempts leave for their post-mortem: the plan and the slots that later attempts replace; the trace of jobs"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "post_mortems",
        sa.Column("attempt_id", sa.String(60), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("plan", sa.Text(), nullable=True),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("slots", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("attempt_id", name="pk_post_mortems"),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_post_mortems_attempt_id_attempts"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_post_mortems_job_id_jobs"),
    )
    op.add_column("jobs", sa.Column("traceparent", sa.String(55), nullable=True))
    op.create_index("ix_post_mortems_job_id", "post_mortems", ["job_id"])


def downgrade() -> None:
    op.drop_column("jobs", "traceparent")
    op.drop_table("post_mortems")
