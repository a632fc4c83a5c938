"""Run by alembic for every command; `router_svc.store.database` hands it an open connection.

Deliberately does not touch logging: that belongs to the process, not to a library.
"""

from alembic import context

from router_svc.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # Another service may keep its own tables, and its own history, in the same database.
    version_table="router_alembic_version",
    # The caller's transaction holds all steps, on SQLite too: half a migration is never seen.
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
