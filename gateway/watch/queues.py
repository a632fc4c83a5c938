"""Queues of the router as a source of a watch."""

import asyncio
from collections.abc import AsyncGenerator, Mapping

from gateway.watch.source import Change, WatchCaller, WatchSource, delete, put_message, synced
from weft.api.gateway.v1 import admin_model_pb2
from weft.dispatch.placement import QueueSource
from weft.kernel.access.principal import Access, Resource, Role
from weft.kernel.requests.placement_request import PoolQueue
from weft.kernel.time.clock import Clock


def queues_by_name(queues: QueueSource, clock: Clock, interval_seconds: float) -> WatchSource:
    """Queues by public name; those of routes by `route/NAME`.

    The router is read at intervals, once for all streams of the gateway.
    """
    latest: Mapping[str, PoolQueue] = {}
    read_at: float | None = None
    lock = asyncio.Lock()

    async def read() -> Mapping[str, PoolQueue]:
        """Returns the queues, at most half an interval old. Raises SERVICE_UNAVAILABLE."""
        nonlocal latest, read_at
        async with lock:
            now = clock.monotonic()
            if read_at is None or now - read_at > interval_seconds / 2:
                latest = {queue.pool: queue for queue in await queues.queues()}
                read_at = now
            return latest

    async def changes(_caller: WatchCaller) -> AsyncGenerator[Change]:
        known: Mapping[str, PoolQueue] | None = None
        while True:
            found = await read()
            for name in (known or {}).keys() - found.keys():
                yield delete(name)
            for name, queue in found.items():
                if known is None or _shown(known.get(name)) != _shown(queue):
                    yield put_message(name, _message(queue))
            if known is None:
                yield synced()
            known = found
            await clock.sleep(interval_seconds)

    return WatchSource(kind="queue", access=Access(Resource.OPERATIONS, Role.VIEW), changes=changes)


def _shown(queue: PoolQueue | None) -> tuple[int, int, int] | None:
    """Returns the figures of a queue that readers see."""
    return None if queue is None else (queue.waiting, queue.max_waiting, queue.running)


def _message(queue: PoolQueue) -> admin_model_pb2.Queue:
    return admin_model_pb2.Queue(waiting=queue.waiting, max_waiting=queue.max_waiting, running=queue.running)
