"""HTTP/1.1 client of an engine, optimized for many short streams on reused connections."""
