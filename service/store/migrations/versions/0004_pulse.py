"""A pulse that shows that writes are taken; why a driver was stopped; tokens that expire"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "pulses",
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_pulses"),
    )
    op.add_column("attempts", sa.Column("stopped_because", sa.Text(), nullable=True))
    op.add_column("tokens", sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    op.drop_column("tokens", "expires_at")
    op.drop_column("attempts", "stopped_because")
    op.drop_table("pulses")
