"""Adapters to real engines, one file each, behind `port.Backend`."""
