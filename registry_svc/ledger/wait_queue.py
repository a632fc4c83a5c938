"""Who waits for memory, and how they are told."""

import asyncio
from dataclasses import dataclass, field

from registry_svc.ledger.domain import Waiting
from registry_svc.ledger.policy.leases import Lease
from registry_svc.ledger.policy.memory_request import Wish
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """One call that waits. It hears the newest word, and its outcome."""

    wish: Wish
    word: Waiting | None = None
    outcome: Lease | WeftError | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, word: Waiting) -> None:
        """Tell it what it waits for, if that is new."""
        if word != self.word:
            self.word = word
            self.news.set()

    def finish(self, outcome: Lease | WeftError) -> None:
        """Tell it how its wait ended; only the first outcome counts."""
        if self.outcome is None:
            self.outcome = outcome
            self.news.set()


class Line:
    """Everybody who waits, by host. Their order is the policy's business."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiters: dict[str, dict[str, Waiter]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return sum(len(there) for there in self._waiters.values())

    def hosts(self) -> list[str]:
        """Where somebody waits."""
        return list(self._waiters)

    def on(self, host: str) -> list[Waiter]:
        """Who waits for memory on one host."""
        return list(self._waiters.get(host, {}).values())

    def next_arrival(self) -> int:
        """The place of somebody who comes now."""
        self._arrivals += 1
        return self._arrivals

    def find(self, host: str, key: str) -> Waiter | None:
        """The call that waits under a key."""
        return self._waiters.get(host, {}).get(key)

    def join(self, waiter: Waiter) -> None:
        """Stand in line. Raises TOO_MANY_RESOURCES when it is full."""
        there = self._waiters.setdefault(waiter.wish.host, {})
        if waiter.wish.key not in there and len(there) >= self._max_waiting:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"{self._max_waiting} requests wait for memory on {waiter.wish.host} already; try again later",
                retry_after_seconds=5.0,
            )
        there[waiter.wish.key] = waiter

    def leave(self, waiter: Waiter) -> None:
        """Step out, if it stands in line still."""
        there = self._waiters.get(waiter.wish.host, {})
        if there.get(waiter.wish.key) is waiter:
            del there[waiter.wish.key]
        if not there:
            self._waiters.pop(waiter.wish.host, None)

    def finish(self, waiter: Waiter, outcome: Lease | WeftError) -> None:
        """Step out with an outcome."""
        self.leave(waiter)
        waiter.finish(outcome)
