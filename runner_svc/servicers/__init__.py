"""The gRPC services of a runner, which only translate between messages and calls."""
