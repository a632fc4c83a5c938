"""The composition root: reads the configuration, builds the services, and runs them together or separately."""
