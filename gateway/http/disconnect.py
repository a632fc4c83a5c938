"""Ending a request from outside: the caller hung up, reads too slowly, or its time is over."""

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
"""Where a request's state has its HangUp, if its server has one."""


class DisconnectNotifier:
    """Tells one listener that the caller of one request has gone."""

    __slots__ = ("_has_happened", "_on_listen", "_tell")

    def __init__(self, on_listen: Callable[[], None]) -> None:
        """`on_listen` is called with every `listen`: a connection that is not read has no end."""
        self._on_listen = on_listen
        self._tell: Callable[[], None] | None = None
        self._has_happened = False

    def listen(self, tell: Callable[[], None]) -> None:
        """Call `tell` once the caller has gone; at once, if that has happened already."""
        self._tell = tell
        if self._has_happened:
            tell()
        else:
            self._on_listen()

    def ignore(self) -> None:
        """Tell nobody any more."""
        self._tell = None

    def happen(self) -> None:
        """The caller has gone."""
        self._has_happened = True
        if self._tell is not None:
            self._tell()


def watch_for_disconnect(scope: Scope, receive: Receive, block: Interruptible) -> Callable[[], object]:
    """End `block` with ClientGoneError when the caller hangs up. Returns what ends the listening.

    A task that waits to receive a disconnect costs some 20 us; where the server tells of it, there is none.
    """
    hang_up = scope.get("state", {}).get(DISCONNECT_KEY)
    if hang_up is None:
        return asyncio.create_task(interrupt_on_disconnect(receive, block)).cancel
    hang_up.listen(partial(_interrupt_gone, block))
    ignore: Callable[[], None] = hang_up.ignore
    return ignore


def _interrupt_gone(block: Interruptible) -> None:
    block.interrupt(ClientGoneError())


async def interrupt_on_disconnect(receive: Receive, block: Interruptible) -> None:
    """Wait until the caller hangs up, then end `block` with ClientGoneError. Run it as a task beside the block."""
    while (await receive())["type"] != "http.disconnect":
        pass
    _interrupt_gone(block)


def deadline_passed(block: Interruptible) -> None:
    """End `block` with DEADLINE_EXCEEDED: a last resort, for a request whose own deadline did not end it."""
    block.interrupt(WeftError(Reason.DEADLINE_EXCEEDED, "the request's deadline passed"))


async def abort_connection(scope: Scope, receive: Receive) -> None:
    """Drop the connection with what is still unread in it: closing it would wait for the reader that does not read."""
    abort = scope.get("state", {}).get(ABORT_KEY)
    if abort is None:
        return
    abort()
    with suppress(TimeoutError):
        async with asyncio.timeout(_ABORT_WAIT_SECONDS):
            while (await receive())["type"] != "http.disconnect":
                pass
