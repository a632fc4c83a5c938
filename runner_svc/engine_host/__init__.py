"""Engines that are libraries: the HTTP server program over one, and requests with rendered prompts.

All but `request` and `translation` run in the engine's environment and import the standard library alone.
docs/decisions/0011-in-process-engines.md.
"""
