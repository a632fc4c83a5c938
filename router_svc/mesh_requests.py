"""Records, figures and queues of all routers of the mesh: this router's own, and those of the others over gRPC."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from typing_extensions import override

from router_svc.merged_records import (
    is_moved,
    merged_clients,
    merged_figures,
    merged_limit_uses,
    merged_queues,
    merged_requests,
    newest_record,
    steps_from,
)
from router_svc.request_history import RequestHistory
from router_svc.request_servicer import request_record
from weft.api.router.v1 import figures_pb2, request_pb2, request_service_pb2
from weft.dispatch.placement import PoolQueue, QueueSource
from weft.dispatch.remote_router import (
    DEFAULT_LISTED,
    MAX_ENDED_WATCHED,
    MAX_LISTED,
    UNDER_WAY,
    ListedRequests,
    RequestSource,
    Selection,
)
from weft.dispatch.router_links import RouterLinks
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.service import start_task, stop_tasks

MAX_WAITING_RESPONSES = 64
"""Responses of other routers that wait for one watcher; more wait at the routers, which end watches that lag."""
RECORDS_PER_RESPONSE = 500
CHECK_INTERVAL_SECONDS = 1.0
"""How often a watch looks whether the mesh has other routers than when it began."""

T = TypeVar("T")
ENDED: Selection = request_service_pb2.REQUEST_SELECTION_ENDED
Ask = Callable[[RequestSource], Coroutine[Any, Any, T]]
Response = request_service_pb2.WatchRequestsResponse


class MeshRequests(RequestSource):
    """A RequestSource over all routers. What a router that cannot be reached remembers is missing, and that is said."""

    def __init__(self, own: RequestSource, links: RouterLinks, clock: Clock) -> None:
        self._own = own
        self._links = links
        self._clock = clock
        self._history: RequestHistory | None = None

    def look_back_in(self, history: RequestHistory) -> None:
        """Find what routers that are gone remembered there; of no use where no other router writes to it."""
        self._history = history if history.is_shared else None

    @override
    async def request(self, request_id: str, tenant: str = "") -> request_pb2.RequestRecord:
        return await self._found(lambda source: source.request(request_id, tenant))

    @override
    async def cancel(self, request_id: str, tenant: str, cancelled_by: str) -> request_pb2.RequestRecord:
        return await self._found(lambda source: source.cancel(request_id, tenant, cancelled_by))

    @override
    async def requests(
        self, limit: int = DEFAULT_LISTED, tenant: str = "", selection: Selection = UNDER_WAY
    ) -> ListedRequests:
        answered = self._answering()
        found, unreachable = await self._all(lambda source: source.requests(limit, tenant, selection))
        if selection != UNDER_WAY:
            found = [*found, await self._of_others(limit, tenant, selection, answered - set(unreachable))]
        moved = sum(is_moved(record) for each in found for record in each.requests)
        return ListedRequests(
            requests=merged_requests((each.requests for each in found), min(limit, MAX_LISTED)),
            total=max(0, sum(each.total for each in found) - moved),
            unreachable_routers=unreachable,
            history_missing=any(each.history_missing for each in found),
            unwritten_count=sum(each.unwritten_count for each in found),
        )

    def _answering(self) -> set[str]:
        return {link.router.name for link in self._links.live()}

    async def _of_others(
        self, limit: int, tenant: str, selection: Selection, answered: Iterable[str]
    ) -> ListedRequests:
        """Returns the ended requests of routers that do not answer, as the database has them."""
        if self._history is None:
            return ListedRequests(requests=(), total=0)
        try:
            entries, total = await self._history.of_others(min(limit, MAX_LISTED), tenant, selection, answered)
        except WeftError:
            return ListedRequests(requests=(), total=0, history_missing=True)
        return ListedRequests(requests=[request_record(entry, with_decisions=False) for entry in entries], total=total)

    @override
    async def clients(self) -> Sequence[request_pb2.ClientRecord]:
        found, _ = await self._all(lambda source: source.clients())
        return merged_clients(found)

    @override
    async def limit_uses(self, tenant: str = "") -> Sequence[request_service_pb2.LimitUse]:
        found, _ = await self._all(lambda source: source.limit_uses(tenant))
        return merged_limit_uses(found)

    @override
    async def figures(self) -> figures_pb2.Figures:
        found, _ = await self._all(lambda source: source.figures())
        return merged_figures(found)

    @override
    async def watch_figures(self) -> AsyncGenerator[figures_pb2.Figures]:
        """As RequestSource.watch_figures. The steps of the mesh are read as often as this router's end."""
        end: int | None = None
        async with aclosing(self._own.watch_figures()) as own:
            async for figures in own:
                if not self._links.live():
                    shown = figures
                else:
                    shown = await self.figures()
                    shown = shown if end is None else steps_from(shown, end)
                if shown.step_count or end is None:
                    end = shown.start_time.ToNanoseconds() + shown.step_count * shown.step.ToNanoseconds()
                    yield shown

    @override
    async def watch(self, tenant: str = "", ended_limit: int = 0) -> AsyncGenerator[Response]:
        """As RequestSource.watch. Raises WATCH_LAGGED when the mesh has other routers than at first."""
        sources = self._sources()
        ended_limit = min(ended_limit, MAX_ENDED_WATCHED)
        others: Sequence[request_pb2.RequestRecord] = ()
        if ended_limit and self._history is not None:
            stored = await self._of_others(ended_limit, tenant, ENDED, self._answering())
            others = stored.requests
        if len(sources) == 1 and not others:
            merged = self._own.watch(tenant, ended_limit)
        else:
            merged = _MergedWatch(sources.values(), tenant, ended_limit, others).responses()
        async with aclosing(merged) as responses:
            waiting: asyncio.Future[Response] | None = None
            try:
                while True:
                    waiting = waiting or asyncio.ensure_future(anext(responses))
                    await asyncio.wait([waiting], timeout=CHECK_INTERVAL_SECONDS)
                    if self._sources().keys() != sources.keys():
                        raise WeftError(
                            Reason.WATCH_LAGGED,
                            "the routers of the mesh have changed; watch again",
                            retry_after_seconds=1,
                        )
                    if waiting.done():
                        response, waiting = waiting.result(), None
                        yield response
            except StopAsyncIteration:
                return
            finally:
                if waiting is not None:
                    await stop_tasks([waiting])  # type: ignore[list-item]  # a task, of a coroutine

    def _sources(self) -> Mapping[tuple[str, str], RequestSource]:
        """Returns the sources that can be read, by name and incarnation of the router; its own is the first."""
        others = {(link.router.name, link.router.incarnation): link.requests for link in self._links.live()}
        return {("", ""): self._own, **others}

    async def _all(self, ask: Ask[T]) -> tuple[Sequence[T], Sequence[str]]:
        """Returns what each router answers, this one's first, and the names of those that do not answer."""
        sources = self._sources()
        own, *others = await asyncio.gather(*map(ask, sources.values()), return_exceptions=True)
        if isinstance(own, BaseException):
            raise own
        found, silent = [own], set(self._links.unreachable)
        for (name, _), answer in zip(list(sources)[1:], others, strict=True):
            if isinstance(answer, WeftError):
                silent.add(name)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.append(answer)
        return found, sorted(silent)

    async def _found(self, ask: Ask[request_pb2.RequestRecord]) -> request_pb2.RequestRecord:
        """Returns the newest record of those that know a request. Raises what the routers raise if none does."""
        sources = self._sources()
        answers = await asyncio.gather(*map(ask, sources.values()), return_exceptions=True)
        record = newest_record(each for each in answers if isinstance(each, request_pb2.RequestRecord))
        if record is not None:
            return record
        raised = [each for each in answers if isinstance(each, BaseException)]
        told = [each for each in raised if not (isinstance(each, WeftError) and each.reason is Reason.NOT_FOUND)]
        error, silent = (told or raised)[0], sorted(self._links.unreachable)
        if isinstance(error, WeftError) and error.reason is Reason.NOT_FOUND and silent:
            # It may well be known there: an answer that it does not exist would be a guess.
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE,
                f"no router that answers knows this request; {', '.join(silent)} cannot be reached, and may",
                retry_after_seconds=1,
            )
        raise error


class MeshQueues(QueueSource):
    """A QueueSource over all routers that answer."""

    def __init__(self, own: QueueSource, links: RouterLinks) -> None:
        self._own = own
        self._links = links

    @override
    async def queues(self) -> Sequence[PoolQueue]:
        reads: list[Awaitable[Sequence[PoolQueue]]] = [self._own.queues()]
        reads += [link.placement.queues() for link in self._links.live()]
        found = await asyncio.gather(*reads, return_exceptions=True)
        if isinstance(found[0], BaseException):
            raise found[0]
        return merged_queues(each for each in found if not isinstance(each, BaseException))


class _MergedWatch:
    """The watches of several routers as one: first what there is at all of them, then their changes as they come."""

    def __init__(
        self,
        sources: Iterable[RequestSource],
        tenant: str,
        ended_limit: int,
        others: Iterable[request_pb2.RequestRecord] = (),
    ) -> None:
        """`others`: ended requests of routers that are gone."""
        self._sources = list(sources)
        self._others = others
        self._tenant = tenant
        self._ended_limit = ended_limit
        self._queue: asyncio.Queue[Response | BaseException] = asyncio.Queue(MAX_WAITING_RESPONSES)

    async def responses(self) -> AsyncGenerator[Response]:
        """Yields the merged responses; raises what one of the watches raises."""
        tasks = [start_task(self._read(source), name="merged-watch") for source in self._sources]
        try:
            async for response in self._snapshot():
                yield response
            while True:
                response = await self._next()
                kept = [record for record in response.requests if not is_moved(record)]
                if kept:
                    yield Response(requests=kept)
        finally:
            await stop_tasks(tasks)

    async def _snapshot(self) -> AsyncGenerator[Response]:
        waiting = len(self._sources)
        first = {(record.tenant, record.request_id): record for record in self._others}
        while waiting:
            response = await self._next()
            waiting -= response.synced
            for record in response.requests:
                # A change may come before all have sent what they had at first.
                key = (record.tenant, record.request_id)
                known = first.get(key)
                first[key] = record if known is None else newest_record((known, record)) or record
        going_on = [record for record in first.values() if record.state != request_pb2.RequestRecord.STATE_ENDED]
        ended = [record for record in first.values() if record.state == request_pb2.RequestRecord.STATE_ENDED]
        records = merged_requests([going_on, merged_requests([ended], self._ended_limit)], len(first))
        for at in range(0, len(records), RECORDS_PER_RESPONSE):
            yield Response(requests=records[at : at + RECORDS_PER_RESPONSE])
        yield Response(synced=True)

    async def _next(self) -> Response:
        found = await self._queue.get()
        if isinstance(found, BaseException):
            raise found
        return found

    async def _read(self, source: RequestSource) -> None:
        try:
            async with aclosing(source.watch(self._tenant, self._ended_limit)) as responses:
                async for response in responses:
                    await self._queue.put(response)
        except WeftError as error:
            await self._queue.put(error)
        else:
            await self._queue.put(WeftError(Reason.SERVICE_UNAVAILABLE, "a router ended its watch; watch again"))
