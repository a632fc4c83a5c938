"""The extensions that weft ships: each folder adds to the core by the hooks of `weft.extension`."""
