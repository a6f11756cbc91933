"""Who uses the files of a job, what they take, and when they were deleted"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.create_table(
        "storage_uses",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("kind", sa.String(20), nullable=False),
        sa.Column("folders", sa.JSON(), nullable=True),
        sa.Column("until", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_storage_uses"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_storage_uses_job_id_jobs"),
    )
    op.create_index("ix_storage_uses_job_id", "storage_uses", ["job_id"])
    op.add_column("jobs", sa.Column("stored_bytes", sa.BigInteger(), nullable=True))
    op.add_column("jobs", sa.Column("files_removed_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "files_removed_at")
    op.drop_column("jobs", "stored_bytes")
    op.drop_table("storage_uses")
