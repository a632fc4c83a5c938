"""Slots: how many requests an instance works on at once. No queue stands behind them; queues belong to the router."""

from collections.abc import Iterator
from contextlib import contextmanager

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

BUSY_RETRY_SECONDS = 1.0


class SlotTable:
    """The slots of one instance and who holds them."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._holders: list[str] = []

    @property
    def total(self) -> int:
        """Requests it can work on at once."""
        return self._total

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
        self._holders.append(request_id)
        try:
            yield
        finally:
            self._holders.remove(request_id)
