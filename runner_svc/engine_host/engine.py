"""What an engine is to its host program: the requests that it works on, and how it refuses or gives up one."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from runner_svc.engine_host.messages import Ready, ToRunner, Work

Send = Callable[[ToRunner], None]
"""Sends a message to the runner, from any thread; blocks while the runner does not read."""


class RefusedError(Exception):
    """An invalid request or load, or an answer that the engine ended; `reason` is the name of a `Reason`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class CancelledRequestError(Exception):
    """The request was cancelled."""


class LibraryMissingError(Exception):
    """The engine's library cannot be imported."""

    def __init__(self, library: str, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.library = library
        self.cause = cause


class Job:
    """A request in work. Its engine answers it by `send`, and ends it early once `is_cancelled`."""

    __slots__ = ("_on_cancel", "id", "is_cancelled", "send")

    def __init__(self, number: int, send: Send) -> None:
        self.id = number
        self.send = send
        self.is_cancelled = False
        """Set by another thread than the engine's."""
        self._on_cancel: Callable[[], object] | None = None

    def cancel(self) -> None:
        """Cancel the request. Called by the thread that reads messages."""
        self.is_cancelled = True
        if (on_cancel := self._on_cancel) is not None:
            on_cancel()

    def when_cancelled(self, on_cancel: Callable[[], object]) -> None:
        """Call this once the request is cancelled, in any thread; at once where it is. It may be called twice."""
        self._on_cancel = on_cancel
        if self.is_cancelled:
            on_cancel()

    def raise_if_cancelled(self) -> None:
        """Raise CancelledRequestError for a cancelled request."""
        if self.is_cancelled:
            raise CancelledRequestError


class Engine(Protocol):
    """A loaded model that works in the thread that calls it."""

    @property
    def facts(self) -> Ready:
        """What it says about itself: how many requests it works on at once."""
        ...

    def work(self, request: Work, job: Job) -> None:
        """Work on a request until it ends, Done the last answer; called from as many threads as the facts have slots.

        Raises RefusedError, CancelledRequestError, or any other error, which fails the request alone.
        """
        ...


def import_library(name: str) -> Any:
    """Returns the module of a library. Raises LibraryMissingError."""
    try:
        return import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise LibraryMissingError(name, error) from error
