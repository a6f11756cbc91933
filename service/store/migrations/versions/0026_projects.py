"""Projects of jobs and saved plans, and their members; what there is belongs to the one that everybody is in."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"


def upgrade() -> None:
    for table in ("jobs", "named_plans"):
        op.add_column(table, sa.Column("project", sa.String(100), nullable=False, server_default="default"))
    op.create_index("ix_jobs_project_created", "jobs", ["project", "created_at", "id"])
    op.create_table(
        "project_members",
        sa.Column("project", sa.String(100), nullable=False),
        sa.Column("principal", sa.String(200), nullable=False),
        sa.Column("role", sa.String(20), nullable=False),
        sa.Column("set_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("project", "principal", name="pk_project_members"),
    )


def downgrade() -> None:
    op.drop_table("project_members")
    op.drop_index("ix_jobs_project_created", "jobs")
    for table in ("named_plans", "jobs"):
        op.drop_column(table, "project")
