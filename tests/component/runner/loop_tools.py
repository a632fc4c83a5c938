"""Tools for the tests of the tool loop, as a runner's configuration names them."""

import asyncio
from pathlib import Path


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def hang(marker: str) -> str:
    """Wait for ever; the file says how far it is."""
    _note(marker, "started")
    try:
        await asyncio.Event().wait()
    finally:
        _note(marker, "cancelled")
    return ""


def _note(marker: str, word: str) -> None:
    Path(marker).write_text(word)
