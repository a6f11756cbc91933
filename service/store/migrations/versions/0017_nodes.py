"""States of nodes, and where the meshes of attempts are."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.create_table(
        "node_states",
        sa.Column("cluster", sa.String(100), nullable=False),
        sa.Column("name", sa.String(253), nullable=False),
        sa.Column("node_id", sa.String(100), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("set_by", sa.String(200), nullable=False),
        sa.Column("set_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("cluster", "name", "node_id", name="pk_node_states"),
    )
    op.create_table(
        "placements",
        sa.Column("attempt_id", sa.String(60), nullable=False),
        sa.Column("mesh", sa.String(100), nullable=False),
        sa.Column("node_id", sa.String(100), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("cluster", sa.String(100), nullable=False),
        sa.Column("node", sa.String(253), nullable=False),
        sa.Column("workers", sa.Integer(), nullable=False),
        sa.Column("failed", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_placements_attempt_id"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_placements_job_id"),
        sa.PrimaryKeyConstraint("attempt_id", "mesh", "node_id", name="pk_placements"),
    )
    op.create_index("ix_placements_cluster_node", "placements", ["cluster", "node"])
    op.create_index("ix_placements_job_id", "placements", ["job_id"])


def downgrade() -> None:
    op.drop_table("placements")
    op.drop_table("node_states")
