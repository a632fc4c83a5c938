"""Signals: recorded by the handler, acted on by whoever waits."""

import asyncio
import signal
from collections.abc import Awaitable


def stop_requested() -> asyncio.Event:
    """Set by SIGINT or SIGTERM. The handler only records; whoever waits acts."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, event.set)
    return event


async def until(stop: asyncio.Event, work: Awaitable[None]) -> bool:
    """Do `work` unless `stop` is set first; whether it was done."""
    working, stopping = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        working.cancel()
        stopping.cancel()
