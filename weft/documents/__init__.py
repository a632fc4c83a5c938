"""Resources as documents: the form that the CLI, YAML files and `/api/v1` show and accept."""
