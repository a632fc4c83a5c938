"""Streams of messages from callers, who may fall silent."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

IDLE_SECONDS = 60.0
"""How long a caller may send nothing."""

MessageT = TypeVar("MessageT")


async def patiently(
    messages: AsyncIterator[MessageT], *, idle_seconds: float = IDLE_SECONDS
) -> AsyncGenerator[MessageT]:
    """Every message. Raises DEADLINE_EXCEEDED where none comes for so long."""
    while True:
        try:
            async with asyncio.timeout(idle_seconds):
                message = await anext(messages)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise WeftError(Reason.DEADLINE_EXCEEDED, f"nothing came for {idle_seconds:g} seconds") from error
        yield message


def broken_off() -> WeftError:
    """What is said, to whoever may still hear it, of a stream that did not say that it is whole."""
    return WeftError(Reason.CANCELLED, "the stream broke off before it said how much it has")
