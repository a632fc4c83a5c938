"""Requests that outlive their callers, in the words of the APIs that people know."""
