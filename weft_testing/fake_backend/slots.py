"""Slots like llama-server's: a fixed number, an internal queue, and a prompt cache per slot."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Token = str | int


@dataclass(slots=True)
class Slot:
    """One slot and its last prompt."""

    id: int
    is_processing: bool = False
    task_id: int = -1
    prompt: Sequence[Token] = field(default_factory=list)
    prompt_tokens_cached: int = 0
    tokens_decoded: int = 0

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in its cache."""
        return len(self.prompt) + self.tokens_decoded


@dataclass(slots=True, eq=False)
class _QueueEntry:
    """A request that waits for `count` slots, including `number` unless it is None."""

    count: int
    number: int | None
    turn: asyncio.Future[None]


class SlotPool:
    """Assigns slots in order of arrival; requests for a specific slot let others pass."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot(id=number) for number in range(count)]
        self._free = list(self.slots)
        self._queue: deque[_QueueEntry] = deque()
        self._tasks_begun = 0

    @property
    def busy(self) -> int:
        """Number of busy slots."""
        return len(self.slots) - len(self._free)

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return len(self._queue)

    @asynccontextmanager
    async def hold(
        self, count: int, prompt: Sequence[Token], *, use_cache: bool, number: int | None = None
    ) -> AsyncIterator[list[Slot]]:
        """Waits for `count` slots (at most all) and holds them during the block; the best cached one is first.

        `number`: the first slot. As in llama-server, an invalid number means any slot.
        """
        count = min(count, len(self.slots))
        if number is not None and not 0 <= number < len(self.slots):
            number = None
        await self._wait_for(count, number)
        held = [self._take(prompt, use_cache=use_cache, number=number)]
        held += [self._take(prompt, use_cache=use_cache) for _ in range(count - 1)]
        self._wake()
        try:
            yield held
        finally:
            for slot in held:
                slot.is_processing = False
            # The most recently used slot is taken last, so that other prompts stay cached.
            self._free.extend(held)
            self._wake()

    async def erase(self, number: int) -> int:
        """Erases a slot's cache once it is free; returns the number of erased tokens."""
        await self._wait_for(1, number)
        slot = self.slots[number]
        count = slot.cached_tokens
        slot.prompt, slot.tokens_decoded = [], 0
        self._wake()
        return count

    async def _wait_for(self, count: int, number: int | None) -> None:
        entry = _QueueEntry(count, number, asyncio.get_running_loop().create_future())
        if not self._queue and self._is_ready(entry):
            return
        self._queue.append(entry)
        self._wake()
        try:
            await entry.turn
        except asyncio.CancelledError:
            self._queue.remove(entry)
            self._wake()
            raise
        self._queue.remove(entry)

    def _wake(self) -> None:
        # One at a time: a woken request stays queued until it takes its slots, then wakes the next.
        for entry in self._queue:
            if entry.turn.done():
                return
            if self._is_ready(entry):
                entry.turn.set_result(None)
                return
            if entry.number is None:
                return

    def _is_ready(self, entry: _QueueEntry) -> bool:
        has_own = entry.number is None or self.slots[entry.number] in self._free
        return has_own and len(self._free) >= entry.count

    def _take(self, prompt: Sequence[Token], *, use_cache: bool, number: int | None = None) -> Slot:
        if number is not None:
            slot = self.slots[number]
            cached = _common_prefix(slot.prompt, prompt) if use_cache else 0
        else:
            slot, cached = self._best(prompt) if use_cache else (self._free[0], 0)
        self._free.remove(slot)
        self._tasks_begun += 1
        slot.is_processing = True
        slot.task_id = self._tasks_begun
        slot.prompt = prompt
        # At least one token is always evaluated, to sample from.
        slot.prompt_tokens_cached = min(cached, max(0, len(prompt) - 1))
        slot.tokens_decoded = 0
        return slot

    def _best(self, prompt: Sequence[Token]) -> tuple[Slot, int]:
        best, most = self._free[0], -1
        for slot in self._free:
            if slot.prompt == prompt:
                return slot, len(prompt)
            common = _common_prefix(slot.prompt, prompt)
            if common > most:
                best, most = slot, common
        return best, most


def _common_prefix(left: Sequence[Token], right: Sequence[Token]) -> int:
    for number, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return number
    return min(len(left), len(right))
