"""Administration: `/v1/admin` (models, operations, memory, audit log), API keys and request records."""
