"""The configuration file: its sections with their ranges and units, and the reading of YAML and environment."""
