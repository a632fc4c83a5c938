"""`/api/v1/watch`: changes of several kinds of things in one stream of server-sent events."""
