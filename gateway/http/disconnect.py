"""Interruption of a request: the caller disconnected, reads too slowly, or the deadline passed."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from starlette.types import Receive, Scope

from gateway.errors import ClientGoneError
from weft.kernel.errors import WeftError
from weft.kernel.interrupt import Interruptible
from weft.kernel.reasons import Reason

ABORT_KEY = "abort_connection"
"""Where a request's state has the function that drops its connection, if its server has one."""
_ABORT_WAIT_SECONDS = 1.0
DISCONNECT_KEY = "hang_up"
"""Where a request's state has its DisconnectNotifier, if its server has one."""


class DisconnectNotifier:
    """Notifies one listener when the caller of one request disconnects."""

    __slots__ = ("_has_happened", "_notify", "_on_listen")

    def __init__(self, on_listen: Callable[[], None]) -> None:
        """`on_listen` is called with every `listen`: it resumes reading, without which no disconnect is seen."""
        self._on_listen = on_listen
        self._notify: Callable[[], None] | None = None
        self._has_happened = False

    def listen(self, notify: Callable[[], None]) -> None:
        """Call `notify` at the disconnect; at once, if that has already happened."""
        self._notify = notify
        if self._has_happened:
            notify()
        else:
            self._on_listen()

    def ignore(self) -> None:
        """Remove the listener."""
        self._notify = None

    def happen(self) -> None:
        """Record the disconnect and notify the listener."""
        self._has_happened = True
        if self._notify is not None:
            self._notify()


def watch_for_disconnect(scope: Scope, receive: Receive, block: Interruptible) -> Callable[[], object]:
    """Interrupt `block` with ClientGoneError at a disconnect. Returns a function that stops watching.

    A task that waits for the disconnect message costs about 20 us; it is only used where the server does not notify.
    """
    notifier = scope.get("state", {}).get(DISCONNECT_KEY)
    if notifier is None:
        return asyncio.create_task(interrupt_on_disconnect(receive, block)).cancel
    notifier.listen(partial(_interrupt_gone, block))
    ignore: Callable[[], None] = notifier.ignore
    return ignore


def _interrupt_gone(block: Interruptible) -> None:
    block.interrupt(ClientGoneError())


async def interrupt_on_disconnect(receive: Receive, block: Interruptible) -> None:
    """Wait for the disconnect, then interrupt `block` with ClientGoneError. Run it as a task beside the block."""
    while (await receive())["type"] != "http.disconnect":
        pass
    _interrupt_gone(block)


def deadline_passed(block: Interruptible) -> None:
    """Interrupt `block` with DEADLINE_EXCEEDED: for a request that outlived its own deadline."""
    block.interrupt(WeftError(Reason.DEADLINE_EXCEEDED, "the request's deadline passed"))


async def abort_connection(scope: Scope, receive: Receive) -> None:
    """Drop the connection with its unread data: closing it would wait for a reader that does not read."""
    abort = scope.get("state", {}).get(ABORT_KEY)
    if abort is None:
        return
    abort()
    with suppress(TimeoutError):
        async with asyncio.timeout(_ABORT_WAIT_SECONDS):
            while (await receive())["type"] != "http.disconnect":
                pass
