"""Requests that wait: queues, priority classes, fair shares of tenants, admission."""
