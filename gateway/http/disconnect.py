"""Interruption of a request: the caller disconnected, reads too slowly, or the deadline passed."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self

from starlette.types import Receive, Scope
from typing_extensions import override

from gateway.errors import ClientGoneError
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.cancellation import Interruptible

ABORT_KEY = "abort_connection"
"""Key in a request's state for the function that drops its connection, if the server provides one."""
_ABORT_WAIT_SECONDS = 1.0
DISCONNECT_KEY = "hang_up"
"""Key in a request's state for its DisconnectNotifier, if the server provides one."""


class DisconnectNotifier:
    """Notifies one listener when the caller of a request disconnects."""

    __slots__ = ("_has_happened", "_notify", "_on_listen")

    def __init__(self, on_listen: Callable[[], None]) -> None:
        """`on_listen` is called by each `listen` to resume reading, without which no disconnect is detected."""
        self._on_listen = on_listen
        self._notify: Callable[[], None] | None = None
        self._has_happened = False

    def listen(self, notify: Callable[[], None]) -> None:
        """Calls `notify` at the disconnect, or immediately if it has happened."""
        self._notify = notify
        if self._has_happened:
            notify()
        else:
            self._on_listen()

    def ignore(self) -> None:
        """Removes the listener."""
        self._notify = None

    def happen(self) -> None:
        """Records the disconnect and notifies the listener."""
        self._has_happened = True
        if self._notify is not None:
            self._notify()


def watch_for_disconnect(scope: Scope, receive: Receive, block: Interruptible) -> Callable[[], object]:
    """Interrupts `block` with ClientGoneError at a disconnect. Returns a function that stops watching.

    If the server does not notify, a task waits for the disconnect message, which costs about 20 us.
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
    """Interrupts `block` with ClientGoneError at the disconnect. Run it as a task beside the block."""
    while (await receive())["type"] != "http.disconnect":
        pass
    _interrupt_gone(block)


def cut_off(block: Interruptible) -> None:
    """Ends a block whose deadline passed."""
    block.interrupt(WeftError(Reason.DEADLINE_EXCEEDED, "the request's deadline passed"))


class WhileConnected(Interruptible):
    """A block that ends with ClientGoneError at a disconnect, and with DEADLINE_EXCEEDED at its deadline."""

    def __init__(self, scope: Scope, receive: Receive, *, cut_off_seconds: float | None = None) -> None:
        """`cut_off_seconds`: time until the deadline; None: no deadline."""
        super().__init__()
        self._scope = scope
        self._receive = receive
        self._cut_off_seconds = cut_off_seconds
        self._guards: list[Callable[[], object]] = []

    @override
    def __enter__(self) -> Self:
        self.begin()
        self._guards.append(watch_for_disconnect(self._scope, self._receive, self))
        if self._cut_off_seconds is not None:
            self._scope["app"].cut_offs.add(self, self._cut_off_seconds)
        return self

    def run_beside(self, work: Coroutine[None, None, None]) -> None:
        """Runs `work` until it ends or the guards are dismissed."""
        self._guards.append(asyncio.create_task(work).cancel)

    def dismiss_guards(self) -> None:
        """Ignores a later disconnect, and cancels the work beside the block; the deadline stays."""
        for dismiss in self._guards:
            dismiss()
        self._guards.clear()

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cut_off_seconds is not None:
            self._scope["app"].cut_offs.remove(self)
        self.dismiss_guards()
        super().__exit__(kind, error, trace)


async def abort_connection(scope: Scope, receive: Receive) -> None:
    """Drops the connection with its unread data, because closing it would wait for the reader."""
    abort = scope.get("state", {}).get(ABORT_KEY)
    if abort is None:
        return
    abort()
    with suppress(TimeoutError):
        async with asyncio.timeout(_ABORT_WAIT_SECONDS):
            while (await receive())["type"] != "http.disconnect":
                pass
