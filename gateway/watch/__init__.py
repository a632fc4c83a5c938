"""`/api/v1/watch`: changes of several kinds in one stream of server-sent events."""
