"""HTTP server programs around engines that are libraries, and requests with rendered prompts.

All but `request` and `translation` run in the engine's environment and import only the standard library.
docs/decisions/0011-in-process-engines.md.
"""
