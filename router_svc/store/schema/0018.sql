-- A record of a request is the columns that statements compare, and its RequestRecord. request_messages.py writes those
-- of older rows, and 0019.sql drops what they replace.
ALTER TABLE request_records ADD COLUMN record BYTEA DEFAULT '' NOT NULL;
-- With the tenant, as SQLite read all records of a tenant to find one of them.
DROP INDEX ix_request_records_request_id;
CREATE INDEX ix_request_records_request_id ON request_records (request_id, tenant);
