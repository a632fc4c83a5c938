-- A conversation is a response that one writer at a time holds.
ALTER TABLE responses ADD COLUMN holder VARCHAR(128) DEFAULT '' NOT NULL;
ALTER TABLE responses ADD COLUMN held_until TIMESTAMP WITH TIME ZONE;
