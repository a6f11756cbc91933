"""Roles of tokens, owners of jobs and packages, secrets, who did what"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    # what a token could do so far: everything but what is new
    op.add_column("tokens", sa.Column("role", sa.String(20), nullable=False, server_default="operator"))
    op.add_column("jobs", sa.Column("owner", sa.String(200), nullable=False, server_default=""))
    op.create_index("ix_jobs_owner_created", "jobs", ["owner", "created_at"])
    op.add_column("events", sa.Column("principal", sa.String(200), nullable=True))
    op.create_table(
        "package_owners",
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.PrimaryKeyConstraint("digest", "owner", name="pk_package_owners"),
        sa.ForeignKeyConstraint(
            ["digest"], ["packages.digest"], name="fk_package_owners_digest_packages", ondelete="CASCADE"
        ),
    )
    op.execute("INSERT INTO package_owners (digest, owner) SELECT digest, '' FROM packages")
    op.create_table(
        "secrets",
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("sealed", sa.Text(), nullable=False),
        sa.Column("set_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("owner", "name", name="pk_secrets"),
    )
    op.create_table(
        "audit",
        sa.Column(
            "number",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("principal", sa.String(200), nullable=False),
        sa.Column("action", sa.String(100), nullable=False),
        sa.Column("subject", sa.String(200), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_audit"),
    )


def downgrade() -> None:
    op.drop_table("audit")
    op.drop_table("secrets")
    op.drop_table("package_owners")
    op.drop_column("events", "principal")
    op.drop_index("ix_jobs_owner_created", "jobs")
    op.drop_column("jobs", "owner")
    op.drop_column("tokens", "role")
