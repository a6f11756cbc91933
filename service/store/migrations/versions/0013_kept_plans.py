"""Plans under names, and which of them a job was submitted with"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "named_plans",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("name", sa.String(100), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("request_digest", sa.String(64), nullable=False),
        sa.Column("measured_by", sa.String(20), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("summary", sa.JSON(), nullable=False),
        sa.Column("made_for", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_named_plans"),
        sa.UniqueConstraint("owner", "name", name="uq_named_plans_owner_name"),
    )
    op.add_column("jobs", sa.Column("given_plan", sa.String(40), nullable=True))
    op.create_index("ix_jobs_given_plan", "jobs", ["given_plan"])


def downgrade() -> None:
    op.drop_index("ix_jobs_given_plan", "jobs")
    op.drop_column("jobs", "given_plan")
    op.drop_table("named_plans")
