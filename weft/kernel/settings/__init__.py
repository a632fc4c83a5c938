"""Annotations of settings, and settings that several services have."""
