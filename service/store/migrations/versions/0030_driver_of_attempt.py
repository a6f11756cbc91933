"""An attempt may be run by the driver of an earlier one, under whose id Ray has it."""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("driver_of", sa.String(60), nullable=True))


def downgrade() -> None:
    op.drop_column("attempts", "driver_of")
