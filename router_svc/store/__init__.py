"""Persistent state of a router. Imported only by hosts with a store, as a runner host has no database."""
