"""Run by alembic for every command; `registry_svc.store.migrate` hands it an open connection.

Deliberately does not touch logging: that belongs to the process, not to a library.
"""

from alembic import context

from registry_svc.store import key_tables, lease_tables, operation_tables
from registry_svc.store.tables import metadata

# Tables are known to `metadata` once their modules have been read.
assert lease_tables.leases.metadata is operation_tables.operations.metadata is metadata
assert key_tables.api_keys.metadata is metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # The caller's transaction holds all steps, on SQLite too: half a migration is never seen.
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
