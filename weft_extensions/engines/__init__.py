"""Engines that are libraries, each in a server program of ours, as the extension `engines`."""
