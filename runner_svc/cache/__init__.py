"""The prefix caches of a runner's engines: tenant isolation, flushes and figures."""
