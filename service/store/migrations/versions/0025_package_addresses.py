"""Packages have the address of the object that holds their content, where the database does not."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    op.add_column("packages", sa.Column("address", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("packages", "address")
