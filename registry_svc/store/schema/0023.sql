-- The highest priority class of a key's requests, as in `common.v1.PriorityCeiling`.
ALTER TABLE api_keys ADD COLUMN max_priority INTEGER NOT NULL DEFAULT 0;
