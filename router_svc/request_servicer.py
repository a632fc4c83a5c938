"""RequestService over the router's own log."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import grpc
from typing_extensions import override

from router_svc.client_registry import ClientRegistry
from router_svc.figures import FiguresRecorder
from router_svc.loop import MAX_NAMED_TENANTS, SchedulingLoop
from router_svc.policy.change_buffer import WatchLimits
from router_svc.policy.decisions import Loads, Placed, Waits
from router_svc.policy.router_request import Request
from router_svc.request_log import RequestLog
from router_svc.request_record import (
    EndedRequest,
    RecordedTask,
    RequestHistory,
    UnderWay,
    add_decisions,
    attempts_of,
    begun_record,
    mark_lost,
)
from weft.api.router.v1 import request_pb2, request_service_pb2_grpc, task_pb2
from weft.api.router.v1 import request_service_pb2 as pb
from weft.dispatch.placement import MAX_CANCELLER_CHARS
from weft.durable.requests import (
    CANCEL_WAIT_SECONDS,
    DEFAULT_LISTED,
    MAX_ENDED_WATCHED,
    MAX_LISTED,
    UNDER_WAY,
    not_cancellable,
    not_remembered,
    shown_to,
)
from weft.kernel.access.rpc_auth import caller
from weft.kernel.channels.rpc import AnsweringServicer
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import datetime_of, set_seconds
from weft.kernel.values.names import MAX_REQUEST_ID_CHARS, MAX_TENANT_CHARS, require_token


def request_record(entry: UnderWay | EndedRequest, *, with_decisions: bool) -> request_pb2.RequestRecord:
    """Return the record of a request."""
    if isinstance(entry, EndedRequest):
        return entry.read() if with_decisions else _listed(entry.read())
    record = begun_record(entry.spec, entry.arrived_wall)
    _fill_status(record, entry.status)
    if isinstance(entry, Request):
        record.attempts.extend(attempts_of(entry.decisions, entry.arrived_at))
    else:
        record.attempts.extend(entry.all_attempts)
        _fill_retry(record, entry)
    if with_decisions:
        add_decisions(record, entry.decisions, entry.arrived_at, has_ended=False)
    return record


def _listed(record: request_pb2.RequestRecord) -> request_pb2.RequestRecord:
    """Return the record of an ended request without what lists do not show."""
    record.ClearField("decisions")
    for attempt in record.receipt.attempts:
        attempt.ClearField("engine_log")
    return record


def _fill_status(record: request_pb2.RequestRecord, status: object) -> None:
    match status:
        case Placed():
            record.state = request_pb2.RequestRecord.STATE_RUNNING
        case Loads():
            record.state = request_pb2.RequestRecord.STATE_LOADING
            record.loading.stage = status.stage
            if status.progress is not None:
                record.loading.progress = status.progress
            if status.eta_seconds is not None:
                set_seconds(record.loading.eta, status.eta_seconds)
        case _:
            record.state = request_pb2.RequestRecord.STATE_QUEUED
            if isinstance(status, Waits):
                record.queued.position = status.position
                record.queued.reason = status.reason
                if status.eta_seconds is not None:
                    set_seconds(record.queued.eta, status.eta_seconds)


def _fill_retry(record: request_pb2.RequestRecord, task: RecordedTask) -> None:
    record.cancelled_by = task.cancelled_by
    if task.retry is not None:
        record.retry.CopyFrom(task.retry)
    if task.placement is None:
        record.queued.reason = task.waits_for


def _records_of(entries: Iterable[UnderWay | EndedRequest]) -> list[request_pb2.RequestRecord]:
    return [request_record(entry, with_decisions=False) for entry in entries]


log = get_logger("weft.router")

Context = grpc.aio.ServicerContext[Any, Any]

RECORDS_PER_RESPONSE = 500
"""Maximum older ended requests per response of a watch."""

CancellationAudit = Callable[[request_pb2.RequestRecord], Awaitable[None]]
"""Writes the audit entry of a cancellation; must not raise."""


async def _not_audited(_: request_pb2.RequestRecord) -> None:
    """Does nothing."""


class JournaledTasks(Protocol):
    """Port to the tasks of journaled requests; see `router_svc.durable.tasks.task_servicer`."""

    async def open_of_request(self, request_id: str, tenant: str) -> Sequence[task_pb2.Task]:
        """Return the unfinished tasks of requests with this id, of one tenant or (empty) of any."""
        ...

    async def cancel(self, tenant: str, task_id: str) -> task_pb2.Task:
        """Cancel a task; a finished one is unchanged. Raises NOT_FOUND."""
        ...


class RequestServicer(AnsweringServicer, request_service_pb2_grpc.RequestServiceServicer):
    """Implements RequestService over the log, the clients and the scheduling loop of this process."""

    def __init__(
        self,
        log: RequestLog,
        clients: ClientRegistry,
        clock: Clock,
        loop: SchedulingLoop,
        audit: CancellationAudit = _not_audited,
        *,
        figures: FiguresRecorder | None = None,
        watches: WatchLimits | None = None,
    ) -> None:
        self._log = log
        self._figures = figures or FiguresRecorder(clock)
        self._watches = watches or WatchLimits()
        self._figure_watches = 0
        self._audit = audit
        self._clients = clients
        self._clock = clock
        self._loop = loop
        self._cancelling: set[asyncio.Task[request_pb2.RequestRecord]] = set()
        self._journal: JournaledTasks | None = None
        self._history: RequestHistory | None = None

    def look_into(self, journal: JournaledTasks) -> None:
        """Also find journaled requests by their own ids; their attempts have the ids of their tasks."""
        self._journal = journal

    def look_back_in(self, history: RequestHistory) -> None:
        """Also find requests in the database."""
        self._history = history

    @override
    async def GetRequest(self, request: pb.GetRequestRequest, context: Context) -> pb.GetRequestResponse:
        request_id = require_token(request.request_id, "request_id", MAX_REQUEST_ID_CHARS)
        tenant = _tenant_of(request.tenant)
        entry = self._log.find(request_id, self._clock.monotonic(), tenant)
        if entry is None:
            for task in await self._journaled(request_id, tenant):
                entry = entry or self._log.find(task.id, self._clock.monotonic(), task.tenant)
        if entry is None:
            record = await self._stored(request_id, tenant, not_remembered)
        else:
            record = request_record(entry, with_decisions=True)
        return pb.GetRequestResponse(request=shown_to(caller(), record))

    async def _stored(
        self, request_id: str, tenant: str, unknown: Callable[[str], WeftError]
    ) -> request_pb2.RequestRecord:
        """Return a request from the database. Raises `unknown`, and SERVICE_UNAVAILABLE."""
        record = None if self._history is None else await self._history.find(request_id, tenant)
        if record is None:
            raise unknown(request_id)
        if not record.state:
            # If it were under way it would be in memory, so its end was dropped before it was written.
            mark_lost(record, datetime_of(record.arrive_time), "the end of the request could not be recorded")
        return record

    @override
    async def ListRequests(self, request: pb.ListRequestsRequest, context: Context) -> pb.ListRequestsResponse:
        if request.limit < 0:
            raise invalid_field("limit", "must not be negative")
        selection = request.selection
        if selection not in pb.RequestSelection.values():
            raise invalid_field("selection", f"must be one of {', '.join(pb.RequestSelection.keys())}")
        tenant = _tenant_of(request.tenant)
        most = min(request.limit or DEFAULT_LISTED, MAX_LISTED)
        if selection == UNDER_WAY:
            going_on, count = self._log.under_way(most, tenant)
            return pb.ListRequestsResponse(requests=_records_of(going_on), total_count=count)
        entries, total = self._log.ended(most, self._clock.monotonic(), tenant, _HAS_OUTCOME[selection])
        records, unwritten, is_missing = _records_of(entries), self._log.unwritten.dropped_count, False
        if self._history is not None:
            try:
                older = await self._history.older(
                    most - len(entries), tenant, selection, self._log.oldest_number, self._log.unwritten.placed_again
                )
            except WeftError:
                # Requests in memory are still worth showing.
                is_missing = True
            else:
                records, total = [*records, *map(_listed, older[0])], total + older[1]
        return pb.ListRequestsResponse(
            requests=records, total_count=total, history_missing=is_missing, unwritten_count=unwritten
        )

    # Coroutines that write end their watch when the call is cancelled; generators would wait for the garbage collector.
    # grpc.aio accepts both, but the generated types only have the latter.
    @override
    async def WatchRequests(  # type: ignore[override]
        self, request: pb.WatchRequestsRequest, context: Context
    ) -> None:
        if request.ended_limit < 0:
            raise invalid_field("ended_limit", "must not be negative")
        tenant = _tenant_of(request.tenant)
        self._require_room()
        ended = min(request.ended_limit, MAX_ENDED_WATCHED)
        with self._log.watching(tenant, ended, self._watches, self._clock) as watch:
            was_synced = False
            while True:
                keys, is_synced = await watch.take()
                found = (entry for key in keys if (entry := self._log.newest(key)) is not None)
                records = [request_record(entry, with_decisions=False) for entry in found]
                if is_synced and not was_synced:
                    async for older in self._older_ended(tenant, ended):
                        await context.write(pb.WatchRequestsResponse(requests=older))
                if records or is_synced != was_synced:
                    await context.write(pb.WatchRequestsResponse(requests=records, synced=is_synced and not was_synced))
                was_synced = is_synced
                # Yield, as other requests must not wait for the whole snapshot.
                await asyncio.sleep(0)

    async def _older_ended(self, tenant: str, ended_limit: int) -> AsyncGenerator[list[request_pb2.RequestRecord]]:
        """Yield ended requests that are no longer in memory, last first; none while the database is unavailable."""
        _, known = self._log.ended(0, self._clock.monotonic(), tenant, _HAS_OUTCOME[pb.REQUEST_SELECTION_ENDED])
        left = ended_limit - known
        if self._history is None or left <= 0:
            return
        number, again = self._log.oldest_number, self._log.unwritten.placed_again
        try:
            records, _ = await self._history.older(left, tenant, pb.REQUEST_SELECTION_ENDED, number, again)
        except WeftError as error:
            log.warning("older requests are not watched", reason=error.reason.name)
            return
        for at in range(0, len(records), RECORDS_PER_RESPONSE):
            yield [*map(_listed, records[at : at + RECORDS_PER_RESPONSE])]

    @override
    async def GetFigures(self, request: pb.GetFiguresRequest, context: Context) -> pb.GetFiguresResponse:
        recorder = (self._figures.day if request.day else None) or self._figures
        return pb.GetFiguresResponse(figures=recorder.figures())

    @override
    async def WatchFigures(  # type: ignore[override]  # see WatchRequests
        self, request: pb.WatchFiguresRequest, context: Context
    ) -> None:
        self._require_room()
        self._figure_watches += 1
        try:
            async with aclosing(self._figures.watch()) as steps:
                async for figures in steps:
                    await context.write(pb.WatchFiguresResponse(figures=figures))
        finally:
            self._figure_watches -= 1

    def close(self) -> None:
        """End all watches with SHUTTING_DOWN."""
        self._log.close()
        self._figures.close()

    def _require_room(self) -> None:
        if self._log.watch_count + self._figure_watches >= self._watches.max_watches:
            raise WeftError(
                Reason.RATE_LIMIT_EXCEEDED,
                f"more than {self._watches.max_watches} watches of requests and figures; close one, or poll",
            )

    @override
    async def CancelRequest(self, request: pb.CancelRequestRequest, context: Context) -> pb.CancelRequestResponse:
        request_id = require_token(request.request_id, "request_id", MAX_REQUEST_ID_CHARS)
        if len(request.requested_by) > MAX_CANCELLER_CHARS:
            raise invalid_field("requested_by", f"must have at most {MAX_CANCELLER_CHARS} characters")
        known = caller()
        cancelled_by = request.requested_by if known.names_tenants and request.requested_by else known.name
        # Once begun it completes even if its caller leaves, as it frees the slot and writes the audit entry.
        cancelling = asyncio.create_task(self._cancelled(request_id, _tenant_of(request.tenant), cancelled_by))
        self._cancelling.add(cancelling)
        cancelling.add_done_callback(self._cancelling.discard)
        record = await asyncio.shield(cancelling)
        return pb.CancelRequestResponse(request=shown_to(known, record))

    async def _cancelled(self, request_id: str, tenant: str, cancelled_by: str) -> request_pb2.RequestRecord:
        """Cancels a request. A dispatcher that does not end it in time loses its slot."""
        journaled = await self._journaled(request_id, tenant)
        tenants = sorted({task.tenant for task in journaled})
        if len(tenants) > 1:
            named = ", ".join(tenants[:MAX_NAMED_TENANTS])
            raise invalid_field("tenant", f"must name one: requests of several tenants have this id ({named})")
        ends = dict(self._loop.cancel(request_id, tenant, cancelled_by))
        idle = []
        records = []
        for task in journaled:
            records.append(self._log.note_canceller(task.tenant, task.id, cancelled_by))
            own = ends if task.id == request_id else self._loop.cancel(task.id, task.tenant, cancelled_by)
            ends |= own
            if not own:
                idle.append(task)
        await self._await_ends(ends)
        if ends and (recorded := [each for each in records if each is not None]):
            await asyncio.wait(recorded, timeout=CANCEL_WAIT_SECONDS)
        cancelled = [task for task in idle if await self._cancel_idle(task, cancelled_by)]
        if cancelled and not ends:
            return _cancelled_record(request_id, cancelled[-1].tenant, cancelled_by)
        return await self._ended(journaled[-1].id if journaled else request_id, tenant, cancelled_by, ends)

    async def _await_ends(self, ends: Mapping[int, asyncio.Future[None]]) -> None:
        if not ends:
            return
        await asyncio.wait(ends.values(), timeout=CANCEL_WAIT_SECONDS)
        for key, ended in ends.items():
            if not ended.done():
                self._loop.finish(key, Reason.CANCELLED)

    async def _journaled(self, request_id: str, tenant: str) -> Sequence[task_pb2.Task]:
        return () if self._journal is None else await self._journal.open_of_request(request_id, tenant)

    async def _cancel_idle(self, task: task_pb2.Task, cancelled_by: str) -> bool:
        """Cancel a journaled request without an attempt on this router; returns False if it ended otherwise."""
        assert self._journal is not None, "the task comes from there"
        ended = await self._journal.cancel(task.tenant, task.id)
        if ended.state != task_pb2.TASK_STATE_CANCELLED:
            return False
        log.info("request cancelled", request_id=task.request_id, tenant=task.tenant, cancelled_by=cancelled_by)
        await self._audit(_cancelled_record(task.request_id, task.tenant, cancelled_by))
        return True

    async def _ended(
        self, request_id: str, tenant: str, cancelled_by: str, ends: Mapping[int, asyncio.Future[None]]
    ) -> request_pb2.RequestRecord:
        """Return the record of a request that ended, and audit its cancellation."""
        entry = self._log.find(request_id, self._clock.monotonic(), tenant)
        if entry is not None:
            record = request_record(entry, with_decisions=True)
        elif ends:
            # The request was not recorded, as too many were under way.
            record = _cancelled_record(request_id, tenant, cancelled_by)
        else:
            record = await self._stored(request_id, tenant, not_cancellable)
        if ends and record.cancelled_by:
            await self._audit(record)
        return record

    @override
    async def ListClients(self, request: pb.ListClientsRequest, context: Context) -> pb.ListClientsResponse:
        return pb.ListClientsResponse(clients=self._clients.records())

    @override
    async def ListLimitUses(self, request: pb.ListLimitUsesRequest, context: Context) -> pb.ListLimitUsesResponse:
        return pb.ListLimitUsesResponse(uses=self._clients.limit_uses(_tenant_of(request.tenant)))


_HAS_OUTCOME: Mapping[int, Callable[[EndedRequest], bool]] = {
    pb.REQUEST_SELECTION_ENDED: lambda _: True,
    pb.REQUEST_SELECTION_COMPLETED: lambda ended: ended.reason is Reason.UNSPECIFIED,
    pb.REQUEST_SELECTION_FAILED: lambda ended: ended.reason not in (Reason.UNSPECIFIED, Reason.CANCELLED),
    pb.REQUEST_SELECTION_CANCELLED: lambda ended: ended.reason is Reason.CANCELLED,
}


def _cancelled_record(request_id: str, tenant: str, cancelled_by: str) -> request_pb2.RequestRecord:
    return request_pb2.RequestRecord(
        request_id=request_id,
        tenant=tenant,
        state=request_pb2.RequestRecord.STATE_ENDED,
        reason=Reason.CANCELLED.value,  # type: ignore[arg-type]  # same numbers
        cancelled_by=cancelled_by,
    )


def _tenant_of(claimed: str) -> str:
    """Return the tenant to filter by; empty: all, which a caller with a fixed tenant cannot read."""
    tenant = require_token(claimed, "tenant", MAX_TENANT_CHARS) if claimed else ""
    known = caller()
    return tenant if known.names_tenants else known.tenant_for(tenant, "tenant")
