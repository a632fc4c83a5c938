"""The shared kernel of all services: time, names, reasons, errors, gRPC plumbing, telemetry. Imports no service."""
