-- The number of the leader's last commit, which tells it whether a commit without an acknowledgement took place.
ALTER TABLE router_leader ADD COLUMN commit_number BIGINT;
