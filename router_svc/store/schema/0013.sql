-- How addresses in the results of a batch begin, as its creator reached the gateway.
ALTER TABLE batches ADD COLUMN result_base VARCHAR(512) NOT NULL DEFAULT '';
