"""Signals: recorded by the handler, acted on by the main task."""

import asyncio
import signal
from collections.abc import Coroutine

from weft.kernel.service import stop_tasks


def stop_requested() -> asyncio.Event:
    """An event that SIGINT, SIGTERM or SIGHUP sets. The handler only records the signal.

    A SIGHUP that was ignored when the process started stays ignored: that is what `nohup` is for.
    """
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, event.set)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, event.set)
    return event


def ignore_hangups() -> None:
    """Ignores further SIGHUPs: a terminal that closes sends several."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: None)


async def until(stop: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Runs `work` unless `stop` is set first; returns whether it was done. Unfinished work is cancelled first."""
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
