"""Run by alembic for every command; `weft.sql.schema` hands it an open connection.

Deliberately does not touch logging: that belongs to the process, not to a library.
"""

from alembic import context

from router_svc.store.tables import SCHEMA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=SCHEMA.metadata,
    # Another service may keep its own tables, and its own history, in the same database.
    version_table=SCHEMA.version_table,
    # The caller's transaction holds all steps, on SQLite too: half a migration is never seen.
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
