"""Which models are loaded, woken and evicted."""
