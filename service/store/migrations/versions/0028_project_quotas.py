"""Projects have quotas of accelerators in queues."""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"


def upgrade() -> None:
    op.create_table(
        "project_quotas",
        sa.Column("project", sa.String(100), nullable=False),
        sa.Column("queue", sa.String(100), nullable=False),
        sa.Column("quota", sa.Integer(), nullable=False),
        sa.Column("set_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("project", "queue", name="pk_project_quotas"),
    )


def downgrade() -> None:
    op.drop_table("project_quotas")
