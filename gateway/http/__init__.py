"""The HTTP server: sockets, TLS, limits of connections and heads, disconnects, and the end of streams at shutdown."""
