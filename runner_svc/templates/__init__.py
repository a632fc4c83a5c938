"""Renders chat templates in a process that can be killed."""
