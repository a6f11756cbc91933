"""The Ray cluster of each attempt, and of a job from its first attempt on"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("cluster", sa.String(100), nullable=False, server_default="default"))
    op.add_column("jobs", sa.Column("cluster", sa.String(100), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "cluster")
    op.drop_column("attempts", "cluster")
