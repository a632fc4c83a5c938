-- Tokens of a shared key have no audience.
ALTER TABLE governance_marks DROP COLUMN audience;
