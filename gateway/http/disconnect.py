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
        """Call `notify` at the disconnect; immediately, if that has already happened."""
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


def _deadline_passed(block: Interruptible) -> None:
    block.interrupt(WeftError(Reason.DEADLINE_EXCEEDED, "the request's deadline passed"))


class WhileConnected(Interruptible):
    """A block that ends with ClientGoneError at the caller's disconnect, and with DEADLINE_EXCEEDED at its deadline."""

    def __init__(self, scope: Scope, receive: Receive, *, cut_off_seconds: float | None = None) -> None:
        """`cut_off_seconds`: None: there is no deadline."""
        super().__init__()
        self._scope = scope
        self._receive = receive
        self._cut_off_seconds = cut_off_seconds
        self._cut_off: asyncio.TimerHandle | None = None
        self._guards: list[Callable[[], object]] = []

    @override
    def __enter__(self) -> Self:
        super().__enter__()
        self._guards.append(watch_for_disconnect(self._scope, self._receive, self))
        if self._cut_off_seconds is not None:
            self._cut_off = asyncio.get_running_loop().call_later(self._cut_off_seconds, _deadline_passed, self)
        return self

    def run_beside(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` until it ends or the guards are dismissed."""
        self._guards.append(asyncio.create_task(work).cancel)

    def dismiss_guards(self) -> None:
        """Ignore a disconnect from now on, and end the work beside the block; the deadline stays."""
        for dismiss in self._guards:
            dismiss()
        self._guards.clear()

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cut_off is not None:
            self._cut_off.cancel()
        self.dismiss_guards()
        super().__exit__(kind, error, trace)


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
