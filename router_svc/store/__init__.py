"""What a router keeps over its restarts. Only what has a store imports it: a runner host has no database."""
