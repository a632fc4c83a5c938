"""Clocks, timestamps, deadlines and cancellation."""
