"""The learning rate of each step."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.add_column("steps", sa.Column("learning_rate", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("steps", "learning_rate")
