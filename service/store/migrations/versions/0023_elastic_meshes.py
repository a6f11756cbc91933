"""Jobs have the least accelerators of an elastic one, those of its last attempt, and until when it waits for these."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("fewest_accelerators", sa.Integer(), nullable=True))
    op.add_column("jobs", sa.Column("last_accelerators", sa.Integer(), nullable=True))
    op.add_column("jobs", sa.Column("patient_until", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "patient_until")
    op.drop_column("jobs", "last_accelerators")
    op.drop_column("jobs", "fewest_accelerators")
