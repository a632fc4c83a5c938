"""Tools for the tests of the tool loop, as a runner's configuration names them."""


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
