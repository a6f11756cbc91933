"""Jobs have the accelerator type that they ask for, attempts that of their accelerators."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("accelerator_type", sa.String(100), nullable=True))
    op.add_column("attempts", sa.Column("accelerator_type", sa.String(100), nullable=True))


def downgrade() -> None:
    op.drop_column("attempts", "accelerator_type")
    op.drop_column("jobs", "accelerator_type")
