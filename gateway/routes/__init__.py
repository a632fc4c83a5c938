"""The HTTP routes. Each module adds its own to the application; what they share is in `gateway.parts`."""
