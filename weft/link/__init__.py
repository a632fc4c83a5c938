"""The link of a dial-out runner: gRPC calls in both directions over one stream, with flow control per call."""
