"""`/v1/admin`: models with all that is known of them, loads and unloads as operations, memory, the audit log."""
