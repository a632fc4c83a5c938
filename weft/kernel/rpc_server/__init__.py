"""A gRPC server for callers of this machine: HTTP/2 in Python, on the event loop itself."""
