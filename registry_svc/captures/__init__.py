"""Captured prompts and answers of tenants, encrypted like secrets."""
