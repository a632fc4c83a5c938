"""The placement port within the router's process and over gRPC, with the same semantics."""

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc
from typing_extensions import override

from router_svc.loop import SchedulingLoop
from router_svc.policy import quotes
from router_svc.request_record import RequestHistory, is_lost
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import placement_service_pb2 as pb
from weft.api.router.v1.quote_pb2 import Quote
from weft.dispatch.agents import require_target
from weft.dispatch.media_work import MAX_WORK
from weft.dispatch.placement import (
    MAX_ATTEMPT_MESSAGE_CHARS,
    Decision,
    OnCancelled,
    Placement,
    RouterPort,
    canceller_of,
)
from weft.dispatch.remote_router import LIST_QUEUES, PLACE, QUOTE, REPORT_END
from weft.durable.journal_policy import JournalPolicy
from weft.kernel.channels.rpc import add_methods, answering
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason, reason_of
from weft.kernel.requests.capabilities import ThinkingMode
from weft.kernel.requests.placement_request import PlacementRequest, PoolQueue, PrefixHolder
from weft.kernel.requests.request_values import CALLER_CLASSES, PREFIX_ENDS, Operation, Priority, Skill
from weft.kernel.services.service_lifecycle import stop_tasks
from weft.kernel.telemetry.structured_logs import carried_traceparent
from weft.kernel.time.timestamps import optional_duration, optional_seconds, set_seconds
from weft.kernel.values.names import (
    MAX_CLIENT_CHARS,
    MAX_NAME_CHARS,
    MAX_REQUEST_ID_CHARS,
    MAX_TENANT_CHARS,
    is_token,
    require_name,
    require_token,
)
from weft.link.carried_calls import CarriedCalls, CarriedContext, Forward

if TYPE_CHECKING:
    from router_svc.loop import Mailbox


class LocalPlacement(RouterPort):
    """A PlacementPort over the scheduling loop of this process."""

    def __init__(self, loop: SchedulingLoop) -> None:
        self._loop = loop
        self._history: RequestHistory | None = None

    def look_back_in(self, history: RequestHistory) -> None:
        """Look up ends in the database that this process does not remember."""
        self._history = history

    @override
    def place(self, request: PlacementRequest) -> "LocalPlace":
        return LocalPlace(self._loop, request)

    @override
    async def quote(self, request: PlacementRequest) -> Sequence[Quote]:
        return [_quote_to_proto(each, request) for each in self._loop.quote(request)]

    @override
    async def queues(self) -> Sequence[PoolQueue]:
        return self._loop.scheduler.queues()

    @override
    async def report_end(self, request: PlacementRequest, receipt: receipt_pb2.Receipt) -> bool:
        if not self._loop.lacks_end(request):
            return False
        stored = None
        if self._history is not None and not self._loop.remembers(request):
            stored = await self._history.find(request.request_id, request.tenant)
            if stored is not None and stored.state and not is_lost(stored):
                return False
        return self._loop.recover(request, receipt, stored)


class LocalPlace(Placement):
    """A Placement over the scheduling loop of this process."""

    never_waits = True

    def __init__(self, loop: SchedulingLoop, request: PlacementRequest) -> None:
        self._loop = loop
        self._request = request
        self._key: int | None = None
        self._mailbox: Mailbox | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._key is not None:
            self._loop.finish(self._key, Reason.CANCELLED)
        if self._mailbox is not None:
            self._mailbox.unwatch()

    @override
    async def next_decision(self) -> Decision:
        if self._mailbox is None:
            self._key, self._mailbox = self._loop.submit(self._request)
        return await self._mailbox.get()

    @override
    def watch_cancellation(self, on_cancelled: OnCancelled) -> None:
        if self._mailbox is not None:
            self._mailbox.watch_cancellation(on_cancelled)

    @override
    async def report_first_content(self, attempt: int) -> None:
        if self._key is not None:
            self._loop.report_first_content(self._key)

    @override
    async def report_attempt_failed(
        self, attempt: int, reason: Reason, message: str = "", retry_after_seconds: float | None = None
    ) -> None:
        if self._key is not None:
            self._loop.report_failed(self._key, attempt, reason, message, retry_after_seconds)

    @override
    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        if self._key is not None:
            self._loop.finish(self._key, reason, receipt)
            self._key = None
        return True


MAX_NEEDED_TOOLS = 128
MAX_REQUEST_LABELS = 35
MAX_AFFINITY_KEY_BYTES = 64
MAX_USAGE_KEY_CHARS = 128
MAX_ATTEMPTS_USED = 1_000
"""Maximum attempts of a request that is placed again; routers allow only a few."""
MAX_AGE_SECONDS = 7 * 86_400.0
"""Maximum age of a request that is placed again; requests live for minutes."""

Context = grpc.aio.ServicerContext[Any, Any]


class PlacementServicer:
    """Implements PlacementService; translation only."""

    def __init__(self, placement: RouterPort, journal: JournalPolicy | None = None) -> None:
        """`journal`: which requests may only be submitted as tasks; None: none."""
        self._placement = placement
        self._journal = journal

    async def place(self, _requests: object, context: CarriedContext) -> None:
        """Serves Place."""
        first = await context.read()
        if not isinstance(first, pb.PlaceRequest) or first.WhichOneof("kind") != "open":
            raise invalid_field("open", "must be the first message of a placement")
        wanted = _request_from_proto(first.open, carried_traceparent(context.invocation_metadata()))
        self._require_unjournaled(wanted)
        async with self._placement.place(wanted) as place:
            reading = asyncio.create_task(self._read_reports(context, place))
            writing = asyncio.create_task(self._write_decisions(context, place))
            try:
                done, _ = await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                ended = [task for task in (reading, writing) if task.done()]
                await stop_tasks({reading, writing}.difference(ended))
                # Retrieve their exceptions, which asyncio would otherwise report after the caller disconnected.
                await asyncio.gather(*ended, return_exceptions=True)

    async def report_end(self, request: pb.ReportEndRequest, context: CarriedContext) -> pb.ReportEndResponse:
        """Serves ReportEnd."""
        if not request.finished.HasField("receipt"):
            raise invalid_field("finished.receipt", "must be set")
        ended = _request_from_proto(request.open, carried_traceparent(context.invocation_metadata()))
        return pb.ReportEndResponse(recorded=await self._placement.report_end(ended, request.finished.receipt))

    async def quote(self, request: pb.QuoteRequest, context: Context) -> pb.QuoteResponse:
        """Serves Quote."""
        async with answering(context):
            asked = _request_from_proto(request.open, carried_traceparent(context.invocation_metadata()))
            return pb.QuoteResponse(quotes=await self._placement.quote(asked))

    async def list_queues(self, _request: pb.ListQueuesRequest, context: Context) -> pb.ListQueuesResponse:
        """Serves ListQueues."""
        async with answering(context):
            return pb.ListQueuesResponse(queues=map(_queue_to_proto, await self._placement.queues()))

    def _require_unjournaled(self, wanted: PlacementRequest) -> None:
        """Raise SERVICE_UNAVAILABLE for a request that must be journaled, as tasks are placed inside the router.

        Its dispatcher does not have the setting yet, or has no tenant configuration.
        """
        if self._journal is None or self._journal.required(wanted.model, wanted.tenant, wanted.operation) is None:
            return
        raise WeftError(
            Reason.SERVICE_UNAVAILABLE,
            f"requests for {wanted.model} are journaled, but the gateway has not received this setting; if that "
            "continues, its weft.yaml lacks the router's tenants (router.tenants)",
            retry_after_seconds=1,
        )

    async def _read_reports(self, context: CarriedContext, place: Placement) -> None:
        """Read the dispatcher's reports until it reports the end of the request or disconnects."""
        while isinstance(request := await context.read(), pb.PlaceRequest):
            match request.WhichOneof("kind"):
                case "first_content":
                    await place.report_first_content(request.first_content.attempt)
                case "attempt_failed":
                    failed = request.attempt_failed
                    message = failed.message[:MAX_ATTEMPT_MESSAGE_CHARS]
                    wait = optional_seconds(failed, "retry_after")
                    await place.report_attempt_failed(failed.attempt, reason_of(failed.reason), message, wait)
                case "finished":
                    finished = request.finished
                    receipt = finished.receipt if finished.HasField("receipt") else None
                    await place.report_finished(reason_of(finished.reason), receipt)
                    return
                case _:
                    raise invalid_field("kind", "only reports may follow `open`")

    async def _write_decisions(self, context: CarriedContext, place: Placement) -> None:
        while True:
            try:
                decision = await place.next_decision()
            except WeftError as error:
                if error.reason is Reason.SHUTTING_DOWN:
                    # Dispatchers treat a stopping router like a lost one and place the request again.
                    raise WeftError(Reason.SERVICE_UNAVAILABLE, error.message) from error
                if not (cancelled_by := canceller_of(error)):
                    raise
                # The dispatcher ends the request and reports its end.
                await context.write(pb.PlaceResponse(cancelled=pb.PlaceCancelled(cancelled_by=cancelled_by)))
                await asyncio.Event().wait()
            await context.write(decision)


def add_placement_to_server(
    servicer: PlacementServicer, server: grpc.aio.Server, forward: Forward | None = None
) -> CarriedCalls:
    """Adds PlacementService to a server. Returns the streams on which dispatchers call what belongs to a request.

    `forward` is asked first for each call on them.
    """
    add_methods(server, {QUOTE: servicer.quote, LIST_QUEUES: servicer.list_queues})
    carried = CarriedCalls({PLACE: servicer.place, REPORT_END: servicer.report_end}, forward)
    carried.add_to_server(server)
    return carried


def _request_from_proto(message: pb.PlaceOpen, traceparent: str) -> PlacementRequest:
    if message.operation not in {operation.value for operation in Operation}:
        raise invalid_field("open.operation", f"must be one of {', '.join(each.name.lower() for each in Operation)}")
    priority = Priority.from_wire(message.priority)
    # System priority is reserved for the router's own process: over gRPC, dispatchers act for callers.
    if priority is None or priority not in CALLER_CLASSES:
        raise invalid_field("open.priority", "must be high, normal or low")
    if not 0 <= message.attempts_used <= MAX_ATTEMPTS_USED:
        raise invalid_field("open.attempts_used", f"must be 0 to {MAX_ATTEMPTS_USED}")
    age_seconds = message.age.ToNanoseconds() / 1e9
    if not 0.0 <= age_seconds <= MAX_AGE_SECONDS:
        raise invalid_field("open.age", f"must be 0 to {MAX_AGE_SECONDS:.0f} s")
    _check_sizes(message)
    known_skills = {skill.value for skill in Skill}
    return PlacementRequest(
        request_id=require_token(message.request_id, "open.request_id", MAX_REQUEST_ID_CHARS),
        tenant=require_token(message.tenant, "open.tenant", MAX_TENANT_CHARS),
        model=require_target(message.model, "open.model"),
        operation=Operation(message.operation),
        priority=priority,
        names_priority=message.priority != 0,
        max_priority=Priority.ceiling(message.max_priority),
        allow_remote=message.allow_remote,
        age_seconds=age_seconds,
        is_counted=message.is_counted,
        seconds_left=optional_seconds(message, "time_left"),
        max_wait_seconds=optional_seconds(message, "max_wait"),
        attempts_used=message.attempts_used,
        traceparent=traceparent,
        asked_model=require_token(message.asked_model, "open.asked_model", MAX_NAME_CHARS)
        if message.asked_model
        else "",
        # An invalid caller counts as unknown and does not refuse the request.
        caller=message.caller if is_token(message.caller, MAX_USAGE_KEY_CHARS) else "",
        prompt_tokens=message.prompt_tokens,
        max_output_tokens=message.max_output_tokens if message.HasField("max_output_tokens") else None,
        work=message.work,
        # Unknown skills are ignored, as no model is known to lack them.
        skills=frozenset(Skill(number) for number in message.needed_skills if number in known_skills),
        # So is an unknown mode.
        thinking=_MODES.get(message.needed_thinking, ThinkingMode.DEFAULT),
        tools=frozenset(
            require_name(name, f"open.needed_tools[{index}]") for index, name in enumerate(message.needed_tools)
        ),
        affinity_key=message.affinity_key,
        prefix_digests=tuple(message.prefix_digests),
        prefix_holder=_prefix_holder(message),
        prompt_digest=message.prompt_digest,
        client_id=require_token(message.client_id, "open.client_id", MAX_CLIENT_CHARS) if message.client_id else "",
        labels=frozenset(message.labels),
    )


_MODES: Mapping[int, ThinkingMode] = MappingProxyType({mode.value: mode for mode in ThinkingMode})


def _prefix_holder(message: pb.PlaceOpen) -> PrefixHolder | None:
    """Return the holder of a prompt's beginning; None: none, or it does not match the digests."""
    holder = message.prefix_holder
    if not 0 < holder.digest_count <= len(message.prefix_digests):
        return None
    return PrefixHolder(holder.model, holder.runner, holder.runner_incarnation, holder.digest_count)


def _check_sizes(message: pb.PlaceOpen) -> None:
    """Raise INVALID_ARGUMENT naming a field that is out of bounds."""
    if message.prompt_tokens < 0 or message.max_output_tokens < 0:
        raise invalid_field("open", "prompt_tokens and max_output_tokens must not be negative")
    if not 0.0 <= message.work <= MAX_WORK:
        raise invalid_field("open.work", f"must be 0 to {MAX_WORK:.0f}")
    if len(message.needed_tools) > MAX_NEEDED_TOOLS:
        raise invalid_field("open.needed_tools", f"has more than {MAX_NEEDED_TOOLS} entries")
    if len(message.labels) > MAX_REQUEST_LABELS:
        raise invalid_field("open.labels", f"has more than {MAX_REQUEST_LABELS} entries")
    if len(message.affinity_key) > MAX_AFFINITY_KEY_BYTES:
        raise invalid_field("open.affinity_key", f"has more than {MAX_AFFINITY_KEY_BYTES} bytes")
    if len(message.prefix_digests) > len(PREFIX_ENDS):
        raise invalid_field("open.prefix_digests", f"has more than {len(PREFIX_ENDS)} entries")


def _quote_to_proto(quote: quotes.Quote, request: PlacementRequest) -> Quote:
    message = Quote(
        model=quote.candidate.model,
        runner=quote.candidate.runner,
        host=quote.candidate.host,
        remote=quote.candidate.remote,
        wait=optional_duration(None if quote.wait_seconds is None else round(quote.wait_seconds, 3)),
        prompt_tokens=request.prompt_tokens,
        completion_tokens=round(quote.output_tokens),
        measured_count=quote.measured,
    )
    for shown, spread in ((message.first_token, quote.first_token), (message.completion, quote.completion)):
        if spread is not None:
            set_seconds(shown.p50, round(spread.p50, 3))
            set_seconds(shown.p90, round(spread.p90, 3))
    if quote.energy_joules is not None:
        message.energy_millijoules = round(quote.energy_joules * 1e3)
    return message


def _queue_to_proto(queue: PoolQueue) -> pb.PoolQueue:
    message = pb.PoolQueue(
        pool=queue.pool, waiting_count=queue.waiting, max_waiting=queue.max_waiting, running_count=queue.running
    )
    if queue.average_wait_seconds is not None:
        message.average_wait.FromNanoseconds(int(queue.average_wait_seconds * 1e9))
    return message
