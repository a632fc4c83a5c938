"""Tools for developers of weft, which are not in the wheel: `tools.torture`."""
