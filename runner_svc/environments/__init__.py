"""Environments of engines: Python installations under the home, each made from lock files with hashes."""
