"""Signals: recorded by the handler, acted on by whoever waits."""

import asyncio
import signal
from collections.abc import Coroutine

from weft.kernel.service import stop_tasks


def stop_requested() -> asyncio.Event:
    """Set by SIGINT or SIGTERM. The handler only records; whoever waits acts."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, event.set)
    return event


async def until(stop: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Do `work` unless `stop` is set first; whether it was done. Unfinished work is cancelled and has cleaned up."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        stopping.cancel()
        await stop_tasks([working] if not working.done() else [])
