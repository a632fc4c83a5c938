"""Decisions on who owns a database."""
