"""Signed events about ended tasks and batches for the webhooks of tenants: docs/webhooks.md."""
