"""Engine environments: Python installations below weft's home, each created from lock files with hashes."""
