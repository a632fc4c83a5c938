"""Queues of the router as a source of a watch."""

import asyncio
from collections.abc import AsyncGenerator, Mapping

from typing_extensions import override

from gateway.watch.source import Change, WatchCaller, WatchSource, delete, put_message, synced
from weft.api.gateway.v1 import admin_model_pb2
from weft.dispatch.placement import QueueSource
from weft.kernel.clock import Clock
from weft.kernel.placement_request import PoolQueue
from weft.kernel.principal import Access, Resource, Role


class QueuesByName(WatchSource):
    """Queues by public name; those of routes by `route/NAME`.

    The router is read at intervals, once for all streams of the gateway.
    """

    kind = "queue"
    access = Access(Resource.OPERATIONS, Role.VIEW)

    def __init__(self, queues: QueueSource, clock: Clock, interval_seconds: float) -> None:
        self._queues = queues
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._latest: Mapping[str, PoolQueue] = {}
        self._read_at: float | None = None
        """When `_latest` was read; None: never."""
        self._lock = asyncio.Lock()

    @override
    async def changes(self, caller: WatchCaller) -> AsyncGenerator[Change]:
        known: Mapping[str, PoolQueue] | None = None
        while True:
            found = await self._read()
            for name in (known or {}).keys() - found.keys():
                yield delete(name)
            for name, queue in found.items():
                if known is None or _shown(known.get(name)) != _shown(queue):
                    yield put_message(name, _message(queue))
            if known is None:
                yield synced()
            known = found
            await self._clock.sleep(self._interval_seconds)

    async def _read(self) -> Mapping[str, PoolQueue]:
        """Returns the queues, at most half an interval old. Raises SERVICE_UNAVAILABLE."""
        async with self._lock:
            now = self._clock.monotonic()
            if self._read_at is None or now - self._read_at > self._interval_seconds / 2:
                self._latest = {queue.pool: queue for queue in await self._queues.queues()}
                self._read_at = now
            return self._latest


def _shown(queue: PoolQueue | None) -> tuple[int, int, int] | None:
    """Returns the figures of a queue that readers see."""
    return None if queue is None else (queue.waiting, queue.max_waiting, queue.running)


def _message(queue: PoolQueue) -> admin_model_pb2.Queue:
    return admin_model_pb2.Queue(waiting=queue.waiting, max_waiting=queue.max_waiting, running=queue.running)
