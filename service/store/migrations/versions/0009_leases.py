"""Leases with fencing tokens; which code may work with these tables"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "leases",
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("holder", sa.String(200), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("taken_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
    op.create_table(
        "compatibility",
        sa.Column("oldest_code", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("oldest_code", name="pk_compatibility"),
    )
    op.execute("INSERT INTO compatibility (oldest_code) VALUES ('0008')")


def downgrade() -> None:
    op.drop_table("compatibility")
    op.drop_table("leases")
