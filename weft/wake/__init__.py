"""Wake recipes and their execution. Runners wake their models, routers wake hosts."""
