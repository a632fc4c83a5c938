"""A stream of changes of several kinds: reads every source, survives outages, and writes what is new."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from gateway.errors import internal_error
from gateway.watch.source import Change, ChangeType, WatchCaller, WatchSource
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.text.json_lines import encode_json
from weft.kernel.time.clock import Clock

_Key = tuple[str, str, str]
_MARKS = frozenset({ChangeType.SYNCED, ChangeType.RESET, ChangeType.UNAVAILABLE})


class CoalescingBuffer:
    """A queue of changes by kind and name. A change replaces a waiting one of the same name in place."""

    def __init__(self, max_names: int) -> None:
        """`max_names`: maximum waiting names, over all kinds."""
        self._max_names = max_names
        self._waiting: dict[_Key, Change] = {}
        self._names = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, kind: str, change: Change) -> bool:
        """Queues a change; returns False if there is no room for another name.

        A `reset` drops the waiting changes of its kind. Changes of a whole kind always have room, since at most one of
        each type waits.
        """
        if change.type in _MARKS:
            if change.type is ChangeType.RESET:
                self._drop(kind)
            key = (kind, "", change.type.value)
            # The mark follows everything that was offered before it.
            self._waiting.pop(key, None)
            self._waiting[key] = change
            return True
        key = (kind, change.name, "")
        if key not in self._waiting:
            if self._names >= self._max_names:
                return False
            self._names += 1
        self._waiting[key] = change
        return True

    def take(self) -> tuple[str, Change] | None:
        """Removes the oldest change and returns it with its kind; None: none waits."""
        key = next(iter(self._waiting), None)
        if key is None:
            return None
        return key[0], self._removed(key)

    def _drop(self, kind: str) -> None:
        for key in [key for key in self._waiting if key[0] == kind]:
            self._removed(key)

    def _removed(self, key: _Key) -> Change:
        self._names -= not key[2]
        return self._waiting.pop(key)


FIRST_RETRY_SECONDS = 0.25
MAX_RETRY_SECONDS = 5.0
_WRITE_BYTES = 64 * 1024
"""Approximate maximum of one write; the rest waits for the next, and is merged meanwhile."""

log = get_logger("weft.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """Bounds of one stream."""

    max_names: int
    """Maximum names waiting for the reader; a source waits while there are more."""
    interval_seconds: float
    """Minimum time between two writes, in which changes of one name are merged."""


class WatchStream:
    """The changes of some kinds for one caller."""

    def __init__(self, sources: Sequence[WatchSource], caller: WatchCaller, limits: WatchLimits, clock: Clock) -> None:
        self._sources = sources
        self._caller = caller
        self._limits = limits
        self._clock = clock
        self._buffer = CoalescingBuffer(limits.max_names)
        self._filled, self._has_room = asyncio.Event(), asyncio.Event()

    async def writes(self) -> AsyncGenerator[bytes]:
        """Yields complete server-sent events, several together if several wait; ends with its reader."""
        pumps = [start_task(self._pump(source), name=f"watch-{source.kind}") for source in self._sources]
        try:
            while True:
                self._filled.clear()
                data = self._taken()
                if data:
                    yield data
                if self._buffer:
                    # Let others run during a long snapshot.
                    await asyncio.sleep(0)
                    continue
                if data:
                    await self._clock.sleep(self._limits.interval_seconds)
                else:
                    await self._filled.wait()
        finally:
            await stop_tasks(pumps)

    def _taken(self) -> bytes:
        """Returns the oldest changes, about one write of them."""
        events: list[bytes] = []
        size = 0
        while size < _WRITE_BYTES and (found := self._buffer.take()) is not None:
            event = _event(*found)
            events.append(event)
            size += len(event)
        self._has_room.set()
        return b"".join(events)

    async def _pump(self, source: WatchSource) -> None:
        """Passes on what a source yields; reads it again as long as the stream lasts."""
        pause, is_away, is_stale = FIRST_RETRY_SECONDS, False, False
        while True:
            try:
                async with aclosing(source.changes(self._caller)) as changes:
                    async for change in changes:
                        if is_stale:
                            await self._offer(source.kind, Change(type=ChangeType.RESET))
                            is_stale = is_away = False
                        if change.type is ChangeType.SYNCED:
                            pause = FIRST_RETRY_SECONDS
                        await self._offer(source.kind, change)
                failure = WeftError(Reason.SERVICE_UNAVAILABLE, "the source ended")
            except WeftError as error:
                failure = error
            except Exception:
                log.exception("source of a watch failed unexpectedly, read again", kind=source.kind)
                failure = internal_error()
            # A source that was read too slowly is available, and is read again from the beginning.
            if not is_away and failure.reason is not Reason.WATCH_LAGGED:
                is_away = True
                await self._offer(source.kind, Change(type=ChangeType.UNAVAILABLE, message=failure.message))
            is_stale = True
            await self._clock.sleep(pause)
            pause = min(2 * pause, MAX_RETRY_SECONDS)

    async def _offer(self, kind: str, change: Change) -> None:
        while not self._buffer.offer(kind, change):
            self._has_room.clear()
            await self._has_room.wait()
        self._filled.set()


def _event(kind: str, change: Change) -> bytes:
    """Returns a change as a server-sent event; empty if its object is gone."""
    facts: dict[str, object] = {"kind": kind, "change": change.type.value}
    if change.name:
        facts["name"] = change.name
    if change.message:
        facts["message"] = change.message
    if change.type is not ChangeType.PUT:
        return b"data: %b\n\n" % encode_json(facts)
    encoded = change.encode()
    return b"" if encoded is None else b'data: %b,"object":%b}\n\n' % (encode_json(facts)[:-1], encoded)
