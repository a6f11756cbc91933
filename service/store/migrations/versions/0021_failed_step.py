"""The last step that a job had reported when an attempt failed: the same failure at the same step is not tried again."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("failed_step", sa.Integer(), nullable=True))


def downgrade() -> None:
    op.drop_column("attempts", "failed_step")
