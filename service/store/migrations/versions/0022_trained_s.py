"""The seconds of a job's steps that count, and of what was stored before their sum."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("trained_s", sa.Double(), nullable=False, server_default="0"))
    op.execute(
        "UPDATE jobs SET trained_s = COALESCE((SELECT SUM(steps.step_s) FROM steps "
        "WHERE steps.job_id = jobs.id AND steps.step <= jobs.step), 0)"
    )


def downgrade() -> None:
    op.drop_column("jobs", "trained_s")
