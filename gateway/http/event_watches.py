"""The limit of open event streams, and their end at shutdown, since they have no deadline."""

from collections.abc import Generator
from contextlib import contextmanager

from gateway.errors import shutting_down
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.cancellation import Interruptible


class EventWatches:
    """The open event streams of a gateway, up to a maximum number."""

    def __init__(self, max_watches: int, setting: str = "gateway.max_event_watches") -> None:
        """`setting`: the name of the maximum, for its error."""
        self._max_watches = max_watches
        self._setting = setting
        self._open: set[Interruptible] = set()
        self._beside: list[EventWatches] = []
        self._is_closed = False

    def beside(self, max_watches: int, setting: str) -> "EventWatches":
        """Returns a separate limit for streams of another kind, which `close` also ends."""
        made = EventWatches(max_watches, setting)
        self._beside.append(made)
        return made

    @contextmanager
    def joined(self, block: Interruptible) -> Generator[None]:
        """Counts `block` as a stream and interrupts it at shutdown. Raises RATE_LIMIT_EXCEEDED above the maximum."""
        if self._is_closed:
            raise shutting_down()
        if len(self._open) >= self._max_watches:
            message = f"more than {self._max_watches} streams of events ({self._setting}); close one, or poll"
            raise WeftError(Reason.RATE_LIMIT_EXCEEDED, message)
        self._open.add(block)
        try:
            yield
        finally:
            self._open.discard(block)

    def close(self) -> None:
        """Interrupts every stream, and refuses new ones."""
        self._is_closed = True
        for block in list(self._open):
            block.interrupt(shutting_down())
        for others in self._beside:
            others.close()
