"""Deadlines of many calls or blocks, with one timer for all."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Deadlines(Generic[T]):
    """The deadlines of many calls or blocks, with one timer for all: nearly each ends before its own."""

    def __init__(self, expire: Callable[[T], None]) -> None:
        """`expire` is called with each whose deadline passed."""
        self._expire = expire
        self._by_owner: dict[T, float] = {}
        self._due = math.inf

    def add(self, owner: T, seconds: float) -> None:
        """Adds a deadline that passes after `seconds`."""
        at = self._by_owner[owner] = time.monotonic() + seconds
        if at < self._due:
            self._due = at
            asyncio.get_running_loop().call_at(at, self._expire_due, at)

    def remove(self, owner: T) -> None:
        """Forgets a deadline, if there is one."""
        self._by_owner.pop(owner, None)

    def _expire_due(self, due: float) -> None:
        if due != self._due:
            # An earlier deadline came after this timer.
            return
        for owner in [owner for owner, at in self._by_owner.items() if at <= due]:
            del self._by_owner[owner]
            self._expire(owner)
        self._due = min(self._by_owner.values(), default=math.inf)
        if self._due < math.inf:
            asyncio.get_running_loop().call_at(self._due, self._expire_due, self._due)
