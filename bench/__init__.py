"""Measures weft against its goal figures, and beside other gateways: `python -m bench --help`."""
