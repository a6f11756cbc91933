"""The first step of a plan that was swapped in while its attempt ran."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    op.add_column("plans", sa.Column("since_step", sa.Integer(), nullable=True))


def downgrade() -> None:
    op.drop_column("plans", "since_step")
