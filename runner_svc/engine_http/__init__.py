"""HTTP/1.1 to one engine: a small client for many short streams on kept connections."""
