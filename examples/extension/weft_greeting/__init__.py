"""Greets over HTTP and in a terminal."""
