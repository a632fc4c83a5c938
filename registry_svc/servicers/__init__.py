"""gRPC in front of the registry: translation only, one module per service of the contract."""
