"""Requests of the caller's tenant, and figures of the last hour, as sources of a watch."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from typing_extensions import override

from gateway.watch.source import Change, ChangeType, WatchCaller, WatchSource, delete, put_message, synced
from weft.api.router.v1.figures_pb2 import Figures
from weft.api.router.v1.request_pb2 import RequestRecord
from weft.api.router.v1.request_service_pb2 import WatchRequestsResponse
from weft.dispatch.remote_router import RequestSource
from weft.kernel.principal import Access, Resource, Role

MAX_ENDED = 1_000
"""Ended requests that a reader has; the one that ended first is deleted first."""


class RequestsOfTenant(WatchSource):
    """The requests under way of the caller's tenant and its last ended ones; the name of one is its id."""

    kind = "request"
    access = Access(Resource.INFERENCE, Role.VIEW)
    by_name = False

    def __init__(self, requests: RequestSource, max_ended: int = MAX_ENDED) -> None:
        self._requests = requests
        self._max_ended = max_ended

    @override
    async def changes(self, caller: WatchCaller) -> AsyncGenerator[Change]:
        ended = _EndedIds(self._max_ended)
        async with aclosing(self._requests.watch(caller.tenant, self._max_ended)) as responses:
            async for response in responses:
                for change in ended.changes(response):
                    yield change


class _EndedIds:
    """The ids of the ended requests that a reader has, so that it never has more than a maximum."""

    def __init__(self, max_ended: int) -> None:
        self._max_ended = max_ended
        self._ids: dict[str, None] = {}
        """In the order of their ends."""
        self._is_synced = False

    def changes(self, response: WatchRequestsResponse) -> Iterator[Change]:
        """Yields the changes of a response."""
        for record in response.requests:
            yield put_message(record.request_id, record)
            self._ids.pop(record.request_id, None)
            if record.state == RequestRecord.STATE_ENDED:
                self._ids[record.request_id] = None
        if response.synced:
            # Until then the last one came first.
            self._ids = dict.fromkeys(reversed(self._ids))
            self._is_synced = True
            yield synced()
        while self._is_synced and len(self._ids) > self._max_ended:
            oldest = next(iter(self._ids))
            del self._ids[oldest]
            yield delete(oldest)


class FiguresOfMesh(WatchSource):
    """The figures of the last hour, then those of each step; the name of one is the start of its first step.

    When a reader has been sent as many steps as an hour has, it gets the hour anew, so that it never has many more.
    """

    kind = "figures"
    access = Access(Resource.TELEMETRY, Role.VIEW)
    by_name = False

    def __init__(self, requests: RequestSource, renewed_after: int = 360) -> None:
        """`renewed_after`: number of steps after which the whole hour is sent again, as a `reset`."""
        self._requests = requests
        self._renewed_after = renewed_after

    @override
    async def changes(self, caller: WatchCaller) -> AsyncGenerator[Change]:
        count: int | None = None
        async with aclosing(self._requests.watch_figures()) as steps:
            async for figures in steps:
                if count is None:
                    count = 0
                    yield _put_figures(figures)
                    yield synced()
                    continue
                count += figures.step_count
                if count < self._renewed_after:
                    yield _put_figures(figures)
                    continue
                count = 0
                yield Change(type=ChangeType.RESET)
                yield _put_figures(await self._requests.figures())
                yield synced()


def _put_figures(figures: Figures) -> Change:
    return put_message(figures.start_time.ToJsonString(), figures)
