"""Requests that outlive their callers: accepted, claimed, run and kept, in the router's database."""
