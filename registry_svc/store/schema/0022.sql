-- The number of the owner's last commit, which tells it whether a commit without an acknowledgement took place.
ALTER TABLE ownership ADD COLUMN commit_number BIGINT;
