"""Programs that hold an engine in their own process, apart from the runner. Standard library and msgspec only."""
