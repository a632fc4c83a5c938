"""Tools that the gateway runs for models, such as a web search: offers, permission, the loop, and what models read."""
