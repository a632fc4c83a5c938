"""Engines that are libraries: the host program in which one runs, and the runner's end of the channel to it.

`bootstrap`, `host`, `engine`, `messages` and `stop_strings` run in the engine's own environment, which has msgspec and
the library: they import nothing else. docs/decisions/0011-in-process-engines.md.
"""
