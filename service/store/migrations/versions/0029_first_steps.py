"""Attempts have the first step that they reported."""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("first_step", sa.Integer()))


def downgrade() -> None:
    op.drop_column("attempts", "first_step")
