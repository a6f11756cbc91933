"""What a job computes, and its accelerators could"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("step_flops", sa.Double(), nullable=True))
    op.add_column("jobs", sa.Column("peak_flops_per_s", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "peak_flops_per_s")
    op.drop_column("jobs", "step_flops")
