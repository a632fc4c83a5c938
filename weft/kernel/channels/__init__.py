"""gRPC channels and servers, TLS, failover, and rules for outbound connections."""
