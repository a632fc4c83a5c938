"""How long requests wait, and the status messages that say so."""
