"""The link of a dial-out runner: gRPC calls both ways over one stream, each with its own flow control."""
