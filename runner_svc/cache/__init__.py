"""The prefix caches of a runner's engines: who may use what of them, and how it is forgotten."""
