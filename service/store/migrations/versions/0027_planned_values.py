"""Attempts have what was planned of them, and of what model they are, for forecasts of others."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("planned_step_s", sa.Double(), nullable=True))
    op.add_column("attempts", sa.Column("planned_peak_bytes", sa.BigInteger(), nullable=True))
    op.add_column("attempts", sa.Column("model_key", sa.String(64), nullable=True))
    op.create_index("ix_attempts_cluster_device_created", "attempts", ["cluster", "device", "created_at"])


def downgrade() -> None:
    op.drop_index("ix_attempts_cluster_device_created", "attempts")
    for name in ("model_key", "planned_peak_bytes", "planned_step_s"):
        op.drop_column("attempts", name)
