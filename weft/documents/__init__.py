"""Resources as documents: the one form in which the CLI, YAML files and `/api/v1` show and take them."""
