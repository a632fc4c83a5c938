"""Requests that outlive their callers: accepted, claimed, run and stored in the router's database."""
