"""Waking what sleeps: recipes as values, and how they are run. Runners wake their own models, routers wake hosts."""
