"""What every service stands on: time, names, reasons, errors, gRPC plumbing, telemetry. Imports no service."""
