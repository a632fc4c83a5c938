-- Machines that joined are kept beside the tokens. Tokens of earlier releases are reusable.
ALTER TABLE join_tokens ADD COLUMN name_pattern VARCHAR(128) NOT NULL DEFAULT '';
ALTER TABLE join_tokens ADD COLUMN pool VARCHAR(128) NOT NULL DEFAULT '';
ALTER TABLE join_tokens ADD COLUMN reusable BOOLEAN NOT NULL DEFAULT TRUE;
ALTER TABLE join_tokens ADD COLUMN machine BOOLEAN NOT NULL DEFAULT FALSE;
ALTER TABLE join_tokens ADD COLUMN names TEXT NOT NULL DEFAULT '';
