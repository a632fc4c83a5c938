"""Logs, traces and metrics of a process."""
