"""Shutdown of a process after a signal or the death of a critical background task."""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, NoReturn, Self

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import CRITICAL_TASK, stop_tasks


def stop_requested() -> asyncio.Event:
    """Returns an event that SIGINT, SIGTERM or SIGHUP sets. The handler only records the signal.

    A SIGHUP that was ignored when the process started stays ignored, as `nohup` expects.
    """
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, event.set)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, event.set)
    return event


def reload_requested(stop: asyncio.Event) -> asyncio.Event:
    """Returns an event that SIGHUP sets. Call it after creating `stop`, which SIGHUP sets if the terminal is gone.

    A closing terminal sends SIGHUP, too. A SIGHUP that was ignored when the process started stays ignored.
    """
    event = asyncio.Event()
    had_terminal = _has_terminal()

    def hung_up() -> None:
        (stop if had_terminal and not _has_terminal() else event).set()

    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hung_up)
    return event


def restart_requested(stop: asyncio.Event) -> asyncio.Event:
    """Returns an event that SIGUSR2 sets together with `stop`, to restart the process."""
    event = asyncio.Event()

    def requested() -> None:
        event.set()
        stop.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, requested)
    return event


def start_again() -> NoReturn:
    """Restarts this process with the same command line, environment, terminal and process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - an argument list, and no shell


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal that is not closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def ignore_hangups() -> None:
    """Ignores further SIGHUPs, since a closing terminal sends several."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: None)


async def until(stop: asyncio.Event, work: Coroutine[None, None, None]) -> bool:
    """Runs `work` until it ends or `stop` is set; returns whether it ended. Unfinished work is cancelled."""
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


class CriticalTasks:
    """Watches this event loop's critical tasks (`service_lifecycle.start_critical`) while its block runs.

    The first task that dies sets `stop`, so that the process drains as after a signal. Leaving the block then raises
    INTERNAL with the task's name and error.
    """

    def __init__(self, stop: asyncio.Event) -> None:
        self._stop = stop
        self._loop = asyncio.get_running_loop()
        self._death: WeftError | None = None

    def __enter__(self) -> Self:
        self._loop.set_exception_handler(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.set_exception_handler(None)
        if self._death is not None:
            raise self._death from error

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        name, error = context.get(CRITICAL_TASK), context.get("exception")
        if name is None or error is None:
            loop.default_exception_handler(context)
            return
        if self._death is None:
            self._death = WeftError(
                Reason.INTERNAL,
                f"the background task {name} died ({error_text(error)}), so this process ends; "
                "its log has the traceback",
            )
        self._stop.set()


def error_text(error: BaseException) -> str:
    """Returns an error as text without content of requests: the type, and for a file its path and the cause."""
    if isinstance(error, WeftError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        where = f" {error.filename}" if error.filename else ""
        return f"{type(error).__name__}{where}: {error.strerror}"
    return type(error).__name__
