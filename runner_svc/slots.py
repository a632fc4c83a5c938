"""Slots: how many requests an instance works on at once. No queue stands behind them; queues belong to the router."""

from collections.abc import Iterator
from contextlib import contextmanager

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

BUSY_RETRY_SECONDS = 1.0


class RequestLimit:
    """How many requests a runner works on at once over all its instances."""

    def __init__(self, max_requests: int | None = None) -> None:
        self._max_requests = max_requests
        self._held = 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Count one request for the length of the block. Raises NO_SLOT_AVAILABLE at once when the limit is reached."""
        if self._max_requests is not None and self._held >= self._max_requests:
            raise WeftError(
                Reason.NO_SLOT_AVAILABLE,
                f"the runner works on {self._max_requests} requests already",
                retry_after_seconds=BUSY_RETRY_SECONDS,
            )
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1


class SlotTable:
    """The slots of one instance and who holds them; `limit` is shared with the runner's other instances."""

    def __init__(self, total: int, limit: RequestLimit | None = None) -> None:
        self._total = total
        self._limit = limit or RequestLimit()
        self._holders: list[str] = []

    @property
    def total(self) -> int:
        """Requests it can work on at once."""
        return self._total

    def resize(self, total: int) -> None:
        """Work on so many at once from now on; those that hold a slot keep it."""
        self._total = total

    @property
    def holders(self) -> tuple[str, ...]:
        """Ids of the requests that hold a slot, in order of arrival."""
        return tuple(self._holders)

    @contextmanager
    def hold(self, request_id: str) -> Iterator[None]:
        """Hold a slot for the length of the block. Raises NO_SLOT_AVAILABLE at once when all are taken."""
        if len(self._holders) >= self._total:
            raise WeftError(
                Reason.NO_SLOT_AVAILABLE,
                f"all {self._total} slots are taken",
                retry_after_seconds=BUSY_RETRY_SECONDS,
            )
        with self._limit.hold():
            self._holders.append(request_id)
            try:
                yield
            finally:
                self._holders.remove(request_id)
