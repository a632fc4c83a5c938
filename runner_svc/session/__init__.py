"""The runner's session with the registry, and the reports that it sends."""
