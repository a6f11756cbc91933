"""What lists and rounds need of a specification, as columns; failures that are forgiven; devices that are fixed"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
_NEW = ("steps_wanted", "workers_per_mesh", "infrastructure_forgiven")


def upgrade() -> None:
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        for name, default in zip(_NEW, ("0", "1", "0"), strict=True):
            batch_op.add_column(sa.Column(name, sa.Integer(), nullable=False, server_default=default))
    connection = op.get_bind()
    jobs = sa.table(
        "jobs",
        sa.column("id", sa.String),
        sa.column("spec", sa.JSON),
        sa.column("device", sa.String),
        sa.column("steps_wanted", sa.Integer),
        sa.column("workers_per_mesh", sa.Integer),
    )
    for (job_id,) in connection.execute(sa.select(jobs.c.id)).all():  # one at a time: they may be long
        spec = connection.execute(sa.select(jobs.c.spec).where(jobs.c.id == job_id)).scalar_one()
        values = {
            "steps_wanted": _whole_number(spec, "training", "steps", 0),
            "workers_per_mesh": _whole_number(spec, "resources", "workers_per_mesh", 1),
        }
        connection.execute(sa.update(jobs).where(jobs.c.id == job_id).values(values))
    attempts = sa.table(
        "attempts",
        sa.column("job_id", sa.String),
        sa.column("number", sa.Integer),
        sa.column("device", sa.String),
    )
    first = sa.select(attempts.c.device).where(attempts.c.job_id == jobs.c.id, attempts.c.number == 1)
    begun = sa.exists().where(attempts.c.job_id == jobs.c.id, attempts.c.number == 1)
    connection.execute(
        sa.update(jobs).where(jobs.c.device == "auto", begun).values(device=first.scalar_subquery())
    )


def downgrade() -> None:
    for name in _NEW:  # not in a batch: that would drop the table that attempts and events point to
        op.drop_column("jobs", name)


def _whole_number(spec: object, section: str, field: str, default: int) -> int:
    part = spec.get(section) if isinstance(spec, dict) else None
    value = part.get(field, default) if isinstance(part, dict) else default
    return value if isinstance(value, int) and 0 <= value < 2**31 else default
