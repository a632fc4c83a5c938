"""The gRPC services of a runner: translation between messages and calls only."""
