"""The outcome of the check of a job before its first attempt."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("check_state", sa.String(20), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "check_state")
