"""Which models are loaded and woken, and which are evicted for them."""
