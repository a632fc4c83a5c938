"""The session of a runner with the registry, and the reports that it sends."""
