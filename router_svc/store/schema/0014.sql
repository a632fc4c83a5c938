-- The serialized Batch. batches_migration.py fills it, and drops the columns that it replaces.
ALTER TABLE batches ADD COLUMN batch BYTEA NOT NULL DEFAULT '';
