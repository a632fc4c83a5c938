"""Slots as llama-server has them: a fixed number, a waiting line inside, and a prompt cache per slot."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Token = str | int


@dataclass(slots=True)
class Slot:
    """One slot and what it last worked on."""

    id: int
    is_processing: bool = False
    task_id: int = -1
    prompt: Sequence[Token] = field(default_factory=list)
    prompt_tokens_processed: int = 0
    prompt_tokens_cached: int = 0
    tokens_decoded: int = 0
    tokens_remaining: int = -1


class SlotPool:
    """Hands out slots in order of arrival."""

    def __init__(self, count: int) -> None:
        self.slots = [Slot(id=number) for number in range(count)]
        self._free = list(self.slots)
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._tasks_begun = 0

    @property
    def busy(self) -> int:
        """Slots at work."""
        return len(self.slots) - len(self._free)

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    @asynccontextmanager
    async def hold(self, count: int, prompt: Sequence[Token], *, use_cache: bool) -> AsyncIterator[list[Slot]]:
        """Wait for `count` slots (at most all there are) and keep them for the block; the best cached one is first."""
        count = min(count, len(self.slots))
        await self._wait_for(count)
        held = [self._take(prompt, use_cache=use_cache) for _ in range(count)]
        self._wake()
        try:
            yield held
        finally:
            for slot in held:
                slot.is_processing = False
            # The slot that was used last is taken last, so that other prompts stay cached.
            self._free.extend(held)
            self._wake()

    async def _wait_for(self, count: int) -> None:
        if not self._line and len(self._free) >= count:
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (count, turn)
        self._line.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            self._line.remove(entry)
            self._wake()
            raise
        self._line.remove(entry)

    def _wake(self) -> None:
        # One at a time: who is woken stays in line until it takes its slots, then wakes the next.
        if self._line and len(self._free) >= self._line[0][0] and not self._line[0][1].done():
            self._line[0][1].set_result(None)

    def _take(self, prompt: Sequence[Token], *, use_cache: bool) -> Slot:
        slot, cached = self._best(prompt) if use_cache else (self._free[0], 0)
        self._free.remove(slot)
        self._tasks_begun += 1
        slot.is_processing = True
        slot.task_id = self._tasks_begun
        slot.prompt = prompt
        # At least one token is always evaluated, to have something to sample from.
        slot.prompt_tokens_cached = slot.prompt_tokens_processed = min(cached, max(0, len(prompt) - 1))
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
