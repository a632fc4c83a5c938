"""Limits, files and memory of the machine that a process runs on."""
