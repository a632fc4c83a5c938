-- The join token or machine by which a runner joined.
ALTER TABLE runners ADD COLUMN joined_by VARCHAR(128) NOT NULL DEFAULT '';
