"""Alembic's environment: runs the migrations on the connection that `Database.start` gives it."""

from alembic import context

from service.store.tables import Base


def _run(connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


_run(context.config.attributes["connection"])
