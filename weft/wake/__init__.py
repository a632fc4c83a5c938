"""Waking what sleeps: recipes as messages, and how they are run. Runners wake their own models, routers wake hosts."""
