"""Executes a request: obtains a grant, calls the runner, fails over before the first content, writes the receipt.

The router only decides and never sees a token; a runner's chunks pass through here unchanged. Differences between
operations are in `weft.dispatch.operation_table`.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import grpc

from weft.api.common.v1 import (
    agent_behaviour_pb2,
    chat_pb2,
    completion_pb2,
    event_pb2,
    receipt_pb2,
    workflow_pb2,
)
from weft.api.router.v1.placement_service_pb2 import Granted
from weft.api.runner.v1 import serve_options_pb2, ticket_pb2
from weft.dispatch.agents import (
    skills_lacking_behind,
    usable_names,
)
from weft.dispatch.aliases import resolve_names
from weft.dispatch.call import Call, RequestDispatcher, with_events
from weft.dispatch.end_reporter import EndReporter
from weft.dispatch.fleet import FleetSource, FleetView
from weft.dispatch.frames import Frame
from weft.dispatch.labelers import Labelers
from weft.dispatch.operation_table import ChunkT, OperationSpec, PayloadT, ended_early
from weft.dispatch.parameter_checks import serve_options
from weft.dispatch.payload_description import (
    Description,
    affinity_key,
    cache_scope,
    describe,
)
from weft.dispatch.placement import Decision, PlacementPort, canceller_of
from weft.dispatch.prefix_holders import PrefixHolders
from weft.dispatch.presets import changed_warning
from weft.dispatch.prices import known_price
from weft.dispatch.prompt_beginnings import PromptBeginnings
from weft.dispatch.reconnecting_placement import ReconnectConfig, ReconnectingPlacement
from weft.dispatch.request_receipt import RequestContext, RequestTrace, log_internal, log_receipt
from weft.dispatch.request_spans import request_spans
from weft.dispatch.token_counts import PromptCounts, TokenCounter
from weft.kernel.access.rpc_auth import caller
from weft.kernel.errors.error_tree import (
    LACKED_ROUTER,
    MAX_RETRY_AFTER_SECONDS,
    PROMPT_ESTIMATED,
    PROMPT_TOKENS,
    WeftError,
)
from weft.kernel.errors.reasons import Reason, reason_of
from weft.kernel.requests.placement_request import PlacementRequest, PrefixHolder
from weft.kernel.requests.request_values import Priority
from weft.kernel.telemetry.structured_logs import TRACEPARENT
from weft.kernel.telemetry.tracing import NO_TRACING, ServiceName, TraceContext, Tracing
from weft.kernel.time.cancellation import task_is_cancelled
from weft.kernel.time.clock import Clock, SystemClock
from weft.kernel.time.timestamps import optional_seconds, seconds_of
from weft.kernel.values.address import metadata_of
from weft.kernel.values.names import AGENT_PREFIX, CENTRAL_RUNNER, WORKFLOW_PREFIX
from weft.kernel.values.unknown_names import UNKNOWN_NAME, among, of_the_kind
from weft.link.carried_calls import CallStreams, CarriedCall

if TYPE_CHECKING:
    from weft.dispatch.run_observer import ObservedRun, RunObserver

T = TypeVar("T")

STREAM_END_SECONDS = 0.01
"""How long the stream of a complete answer may stay open before it is reset."""
SNAPSHOT_CHECK_SECONDS = 0.05
"""Interval of checks for the first snapshot; they end at `ReconnectConfig.router_outage_limit_seconds`."""


_FAILURES = frozenset({receipt_pb2.OUTCOME_FAILED, receipt_pb2.OUTCOME_REJECTED})
"""Outcomes whose traces are always recorded. Cancellations are too frequent for that."""


class Dispatcher(RequestDispatcher):
    """Turns requests into calls. Each process that serves callers has one: every gateway and router."""

    def __init__(
        self,
        placement: PlacementPort,
        streams: CallStreams,
        *,
        clock: Clock | None = None,
        steady: ReconnectConfig | None = None,
        fleet: FleetSource | None = None,
        tracing: Tracing = NO_TRACING,
        service: ServiceName = ServiceName.ROUTER,
    ) -> None:
        """`fleet` resolves agents; without it there are none. `service` is the process's name in traces."""
        self.placement = placement
        self.streams = streams
        self.clock = clock or SystemClock()
        self.steady = steady or ReconnectConfig()
        self.fleet = fleet
        self.tracing = tracing
        self.service = service
        self.observers: Sequence[RunObserver] = ()
        """Follow the requests, for captures and trials."""
        self.ends: EndReporter | None = None
        """Reports how requests ended after their router was lost; None: those ends are dropped."""
        self.beginnings = PromptBeginnings()
        self.holders = PrefixHolders()
        self.labelers = Labelers()
        self.prompt_counts = PromptCounts()

    def call(
        self, spec: OperationSpec[PayloadT, ChunkT], context: RequestContext, payload: PayloadT, *, whole: bool = False
    ) -> Call[ChunkT]:
        """See `RequestDispatcher.call`."""
        return Call(spec, context, payload, self._run, whole=whole)

    def report_ends_to(self, ends: EndReporter) -> None:
        """Sends the ends of requests whose router was lost to `ends`; the owner of `ends` stops it."""
        self.ends = ends

    def view(self) -> FleetView:
        """Returns the current view of the mesh; empty without a fleet."""
        return FleetView(revision=1) if self.fleet is None else self.fleet.view

    def record(self, trace: RequestTrace, receipt: receipt_pb2.Receipt, ended: float) -> None:
        """Records the spans of a request that has ended, and the id in its receipt, if its trace is recorded."""
        if self.tracing.sampling is None:
            return
        context = TraceContext.parse(trace.context.traceparent)
        has_failed = receipt.outcome in _FAILURES
        if self.tracing.records(context, has_failed=has_failed, seconds=ended - trace.arrived):
            receipt.trace_id = f"{context.trace_id:032x}"
            epoch = int((self.clock.utc_now().timestamp() - self.clock.monotonic()) * 1e9)
            self.tracing.record(request_spans(trace, receipt, self.service, ended=ended, epoch=epoch))

    def _run(self, call: Call[T], /) -> AsyncGenerator[T]:
        run = _RequestRun(self, call)
        if self.observers:
            view = self.view()
            for observer in self.observers:
                if (observed := observer.observe(view, call.context, call.payload)) is not None:
                    run.observed = (*run.observed, observed)
        return _observed_chunks(run) if run.observed else run.chunks()


def placement_request(
    context: RequestContext,
    description: Description,
    *,
    prompt_tokens: int,
    seconds_left: float | None,
    holders: PrefixHolders | None = None,
    labels: frozenset[str] = frozenset(),
) -> PlacementRequest:
    """Returns a request as schedulers see it; `seconds_left` is the time to its deadline, None: no deadline.

    `prompt_tokens`: the expected length of the prompt, see `PromptCounts.expected_of`.
    """
    return PlacementRequest(
        request_id=context.request_id,
        tenant=context.tenant,
        model=context.model,
        operation=context.operation,
        priority=context.priority,
        names_priority=context.names_priority,
        max_priority=context.max_priority,
        allow_remote=context.allow_remote,
        seconds_left=seconds_left,
        max_wait_seconds=context.max_wait_seconds,
        traceparent=context.traceparent,
        prompt_tokens=prompt_tokens,
        max_output_tokens=description.max_output_tokens,
        work=description.work,
        skills=description.skills,
        thinking=description.thinking,
        tools=description.tools,
        affinity_key=affinity_key(context.session, context.tenant),
        prefix_digests=description.prefix_digests,
        prefix_holder=None if holders is None else holders.find(description.prefix_digests),
        prompt_digest=description.prompt_digest,
        client_id=context.client_id,
        asked_model=context.asked_model,
        caller=context.caller,
        labels=labels,
        task_id=context.task_id,
    )


def _may_leave(view: FleetView, grant: Granted) -> bool:
    """Whether using a grant may send data to a remote provider; for an unknown model the ticket decides."""
    known = view.models.get(grant.model)
    if known is None or known.expected:
        return ticket_pb2.TicketClaims.FromString(grant.ticket.claims).allow_remote
    return known.remote


def name_alias(error: Exception, context: RequestContext) -> None:
    """Adds the requested alias to the error for its missing target."""
    if context.asked_model and isinstance(error, WeftError) and error.reason is Reason.MODEL_NOT_FOUND:
        error.message = f"{context.asked_model} is an alias of {context.model}: {error.message}"


class _RequestRun(Generic[T]):
    """The run of one call: its trace, placement, attempts and receipt."""

    def __init__(self, deps: Dispatcher, call: Call[T]) -> None:
        self.deps = deps
        self.call = call
        self.context = call.context
        self.payload: Any = call.payload
        self.behaviour: agent_behaviour_pb2.AgentBehaviour | None = None
        self.workflow: workflow_pb2.Workflow | None = None
        self.provider_headers: Mapping[str, str] = {}
        self.trace = RequestTrace(call.context, deps.clock.monotonic())
        self.observed: Sequence[ObservedRun] = ()
        self.cancelled: WeftError | None = None
        """Why the request was cancelled; None: it was not cancelled while it ran."""
        self._last_error: WeftError | None = None
        self._placing: ReconnectingPlacement | None = None
        self._prefix_digests: tuple[int, ...] = ()
        self._estimated_tokens = 0
        """The length of the prompt by its characters."""
        self._is_text_alone = False
        self._notices: Frame = []
        """Warnings about changed parameters, for the caller of a generation."""

    async def chunks(self) -> AsyncGenerator[T]:
        """See `Call.chunks`. Closing or cancelling the iterator cancels the runner's work."""
        call, waiting = self.call, self.call.spec.waiting
        try:
            if "/" in self.context.model or self.context.preset is not None or self.context.task_id:
                await self._until_names_are_known()
                self._resolve_names()
            async with self._place() as placement:
                try:
                    while call.receipt is None:
                        decision = await self._next_decision(placement)
                        if not decision.HasField("granted"):
                            if waiting is not None:
                                yield waiting(decision)
                            continue
                        attempt = _Attempt(self, placement, decision.granted)
                        placement.watch_cancellation(partial(self._cancel, attempt))
                        try:
                            while (chunk := await attempt.next()) is not None:
                                yield with_events(chunk, self._notices) if self._notices else chunk
                        except WeftError as error:
                            attempt.cancel()
                            await self._fail_attempt(placement, decision.granted, error)
                        finally:
                            attempt.cancel()
                except Exception as error:
                    receipt = self.trace.with_engine_logs(self._close_failed(error))
                    await placement.report_finished(_reason_of(error), receipt)
                    raise
                except BaseException:
                    # The caller left: report what is known of the request.
                    receipt = self._close_left()
                    await placement.report_finished(reason_of(receipt.reason), self.trace.with_engine_logs(receipt))
                    raise
                await placement.report_finished(Reason.UNSPECIFIED, self.trace.with_engine_logs(call.receipt))
        except Exception as error:
            self._name_close_ones(error)
            name_alias(error, self.context)
            self._close_failed(error)
            raise
        finally:
            self._hand_over(self._close_left())

    def _name_close_ones(self, error: Exception) -> None:
        """Adds similar names that the caller may use to the error for an unknown name."""
        known = caller()
        # A task runs after its caller has left; the caller's permissions are unknown then.
        if isinstance(error, WeftError) and UNKNOWN_NAME in error.metadata and known.name == self.context.caller:
            names = usable_names(self.deps.view().targets, known)
            among(error, of_the_kind(error, names))

    def _cancel(self, attempt: "_Attempt", error: WeftError) -> None:
        """Ends the request unless its answer is complete; the caller gets the error with the next read."""
        if self.call.receipt is None:
            self.cancelled = error
            attempt.cancel()

    async def _until_names_are_known(self) -> None:
        """Waits for the first snapshot of the mesh, without which no alias, agent or workflow can be resolved."""
        is_late = self.context.task_id and self.context.asked_model
        if not is_late and not self.context.model.startswith((AGENT_PREFIX, WORKFLOW_PREFIX)):
            return
        clock, began = self.deps.clock, self.deps.clock.monotonic()
        limit, own = self.deps.steady.router_outage_limit_seconds, self._seconds_to_deadline()
        ends_at = began + (limit if own is None else min(limit, own))
        while self.deps.view().revision == 0 and clock.monotonic() < ends_at:
            await clock.sleep(SNAPSHOT_CHECK_SECONDS)

    def _resolve_names(self) -> None:
        """Replaces a request for an alias, agent or workflow by a request for its model, for every attempt."""
        found = resolve_names(self.deps.view(), self.context, self.payload)
        if found is not None:
            self.context = self.trace.context = found.context
            self.payload, self.behaviour, self.workflow = found.payload, found.behaviour, found.workflow
            self.trace.changed, self.provider_headers = found.changed, found.provider_headers
            if self.call.spec.waiting is not None:
                self._notices = [event_pb2.InferenceEvent(warning=changed_warning(each)) for each in found.changed]

    def _place(self) -> ReconnectingPlacement:
        context, payload, counts = self.context, self.payload, self.deps.prompt_counts
        description = describe(
            payload,
            salt=cache_scope(context.tenant, context.handling.cache_tag),
            behaviour=self.behaviour,
            unread=lambda: skills_lacking_behind(self.deps.view(), context.model),
        )
        self._estimated_tokens, self._is_text_alone = description.prompt_tokens, not description.skills
        request = placement_request(
            context,
            description,
            prompt_tokens=counts.expected_of(payload, context.model, description.prompt_tokens),
            seconds_left=self._seconds_to_deadline(),
            holders=self.deps.holders,
            labels=self.deps.labelers.labels(context, payload),
        )
        self.trace.prompt_tokens = request.prompt_tokens
        self._prefix_digests = request.prefix_digests
        if request.affinity_key and isinstance(payload, chat_pb2.ChatPayload):
            change = self.deps.beginnings.note(request.affinity_key, context.session, payload)
            self.trace.prompt_change = change
        self._placing = ReconnectingPlacement(
            self.deps.placement,
            request,
            self.deps.clock,
            self.deps.steady,
            knows=lambda name: name in self.deps.view().targets,
            ends=self.deps.ends,
        )
        return self._placing

    def note_counted(self, receipt: receipt_pb2.Receipt) -> None:
        """Learns from the engine's count of a prompt, if it has read this one and only once."""
        payload, usage = self.payload, receipt.usage
        if not isinstance(payload, chat_pb2.ChatPayload) or not self._is_text_alone:
            return
        # Engines that give fewer choices per request read the prompt once for each request.
        may_be_read_again = receipt.tool_run_count or receipt.retried_call_count or payload.choice_count > 1
        if not may_be_read_again and not usage.prompt_estimated:
            self.deps.prompt_counts.note(self.context.model, self._estimated_tokens, usage.prompt_tokens)

    def _hand_over(self, receipt: receipt_pb2.Receipt) -> None:
        """Reports the end of a request that no router received."""
        if self._placing is not None:
            self._placing.hand_over(receipt)

    async def _next_decision(self, placement: ReconnectingPlacement) -> Decision:
        try:
            decision = await placement.next_decision()
        except WeftError as rejection:
            raise reported_error(rejection, self._last_error) from rejection
        if decision.HasField("rate_limits"):
            self.call.rate_limits = decision.rate_limits
        now = self.deps.clock.monotonic()
        if decision.HasField("granted"):
            grant = decision.granted
            view = self.deps.view()
            price = known_price(view, grant.model)
            self.trace.note_grant(grant, now, remote=_may_leave(view, grant), price=price)
            holder = PrefixHolder(grant.model, grant.runner, grant.runner_incarnation, len(self._prefix_digests))
            self.deps.holders.note(self._prefix_digests, holder)
        else:
            self.trace.note_waiting(decision, now)
        return decision

    async def _fail_attempt(self, placement: ReconnectingPlacement, grant: Granted, error: WeftError) -> None:
        """Reports a failed attempt; raises its error if content was already sent."""
        self.trace.note_attempt_failed(error, self.deps.clock.monotonic())
        if self.trace.first_content is not None:
            error.metadata["content_started"] = "true"
            raise error
        if error is self.cancelled:
            raise error
        self._last_error = error
        message = self.trace.attempts[-1].message
        await placement.report_attempt_failed(grant.attempt, error.reason, message, error.retry_after_seconds)

    def seconds_left(self, grant: Granted) -> float | None:
        """Returns the time limit of an attempt that starts now, by the caller's deadline and the route; None: none."""
        own, given = self._seconds_to_deadline(), optional_seconds(grant, "time_left")
        if given is None:
            return own
        return max(0.0, given if own is None else min(given, own))

    def _seconds_to_deadline(self) -> float | None:
        """Returns the time to the caller's deadline; None: no deadline."""
        if self.context.timeout_seconds is None:
            return None
        return max(0.0, self.context.timeout_seconds - (self.deps.clock.monotonic() - self.trace.arrived))

    def close(
        self,
        reason: Reason,
        runner_part: receipt_pb2.Receipt | None,
        *,
        cancelled_by: str = "",
        lacked_router: bool = False,
    ) -> receipt_pb2.Receipt:
        """Writes and returns the receipt."""
        now = self.deps.clock.monotonic()
        receipt = self.call.receipt = self.trace.receipt(reason, runner_part, now)
        receipt.cancelled_by, receipt.lacked_router = cancelled_by, lacked_router
        # A request that no runner got has no answer, and may be captured by the router that takes it.
        has_text = bool(self.observed and self.trace.attempts)
        receipt.captured = has_text and any(each.stores_text for each in self.observed)
        log_receipt(self.context, receipt, now - self.trace.arrived)
        self.deps.record(self.trace, receipt, now)
        return receipt

    def _close_failed(self, error: Exception) -> receipt_pb2.Receipt:
        """Returns the receipt of a failed request; a finished request keeps the one it has."""
        if self.call.receipt is not None:
            return self.call.receipt
        if isinstance(error, WeftError) and error.reason is Reason.INTERNAL:
            log_internal(self.context, error)
        lacked_router = isinstance(error, WeftError) and LACKED_ROUTER in error.metadata
        receipt = self.close(_reason_of(error), None, cancelled_by=canceller_of(error), lacked_router=lacked_router)
        if isinstance(error, WeftError) and PROMPT_ESTIMATED in error.metadata:
            # The caller reads the estimate that the receipt has.
            error.metadata[PROMPT_TOKENS] = str(receipt.usage.prompt_tokens)
        return receipt

    def _close_left(self) -> receipt_pb2.Receipt:
        """Returns the receipt, written now if missing, of a request whose caller left or whose deadline passed."""
        if self.call.receipt is not None:
            return self.call.receipt
        is_late = self._seconds_to_deadline() == 0
        return self.close(Reason.DEADLINE_EXCEEDED if is_late else Reason.CANCELLED, None)


async def _observed_chunks(run: _RequestRun[T]) -> AsyncGenerator[T]:
    """Yields the chunks of a run, and passes them to those that follow it."""
    try:
        async with aclosing(run.chunks()) as chunks:
            async for chunk in chunks:
                for each in run.observed:
                    each.add(cast("Frame", chunk))
                yield chunk
    finally:
        if run.call.receipt is not None:
            for each in run.observed:
                each.end(run.call.receipt)


class _Attempt:
    """An attempt of a request at its runner; see `weft.dispatch.operation_table.Attempt`."""

    def __init__(self, run: _RequestRun[Any], placement: ReconnectingPlacement, grant: Granted) -> None:
        self._run = run
        self._placement = placement
        self._grant = grant
        self._hop = metadata_of(grant.address)
        self._spec: OperationSpec[Any, Any] = run.call.spec
        self._rpc: CarriedCall | None = None
        self._is_complete = False
        self.has_content = False
        self.trace = run.trace
        payload = run.payload
        is_text = isinstance(payload, (chat_pb2.ChatPayload, completion_pb2.CompletionPayload))
        run.trace.seen = None
        if is_text:
            run.trace.seen = TokenCounter(payload, whole=run.call.whole, prompt_tokens=run.trace.prompt_tokens)

    async def next(self) -> Any:
        """Returns the next chunk; None after the last one. Raises the WeftError that ended the attempt."""
        run, rpc = self._run, self._rpc
        if rpc is None:
            rpc = self._rpc = await self._call_runner()
            if run.cancelled is not None:
                raise run.cancelled
        while run.call.receipt is None:
            try:
                response = await rpc.read()
            except WeftError as error:
                raise run.cancelled or runner_error(error) from error
            except asyncio.CancelledError:
                require_cancelled(run.cancelled)
                raise
            if response is grpc.aio.EOF:
                raise run.cancelled or ended_early()
            had_content = self.has_content
            chunk = self._spec.fold(self, response)
            if self.has_content and not had_content:
                await self._placement.report_first_content(self._grant.attempt)
            if chunk is not None:
                return chunk
        return None

    async def _call_runner(self) -> CarriedCall:
        run, grant, spec, rpc = self._run, self._grant, self._spec, self._spec.runner_rpc
        request = rpc.request(options=self._options(), **{spec.payload_field: run.payload})
        request.ticket.CopyFrom(grant.ticket)
        if run.context.agent:
            request.agent = run.context.agent
        if run.behaviour is not None:
            request.behaviour.CopyFrom(run.behaviour)
        if run.workflow is not None:
            request.workflow.CopyFrom(run.workflow)
        metadata = ((TRACEPARENT, self._traceparent()), *self._hop)
        stream = await run.deps.streams.to(grant.address)
        call = stream.call(rpc, metadata, run.seconds_left(grant))
        await call.write(request)
        return call

    def _traceparent(self) -> str:
        """Returns the trace context for the engine: the runner's span of this attempt if it is recorded."""
        run = self._run
        if run.deps.tracing.sampling is not None:
            own = TraceContext.parse(run.context.traceparent)
            if own.is_sampled:
                return own.child(run.trace.attempts[-1].generation_id).traceparent
        return run.context.traceparent

    def _options(self) -> serve_options_pb2.ServeOptions:
        context, grant = self._run.context, self._grant
        handling = context.handling
        if handling.keep_alive_seconds is None and grant.HasField("keep_alive"):
            handling = replace(handling, keep_alive_seconds=seconds_of(grant.keep_alive))
        priority = (Priority.from_wire(grant.priority) if grant.priority else None) or context.priority
        call = self._run.call
        options = serve_options(handling, priority, whole=call.whole, joined_texts=call.joined_texts)
        if grant.runner == CENTRAL_RUNNER:
            options.provider_headers.update(self._run.provider_headers)
        return options

    def cancel(self) -> None:
        """Cancels the runner's work unless the request is complete. Idempotent.

        A complete stream gets a moment to end: an immediate cancellation may arrive before the runner has finished,
        and costs its connection to the engine.
        """
        if self._rpc is None:
            return
        if not self._is_complete or self._rpc.done():
            self._rpc.cancel()
        else:
            asyncio.get_running_loop().call_later(STREAM_END_SECONDS, self._rpc.cancel)

    def note_content(self) -> None:
        self.has_content = True
        self._run.trace.note_first_content(self._run.deps.clock.monotonic())

    def note_tools(self, frame: Frame) -> None:
        self._run.trace.note_tools(frame, self._run.deps.clock.monotonic())

    def complete(self, runner_part: receipt_pb2.Receipt) -> receipt_pb2.Receipt:
        self._is_complete = True
        # A joined machine counts as it likes, and what is learned excludes prompts from its whole pool.
        if not self._hop:
            self._run.note_counted(runner_part)
        return self._run.close(Reason.UNSPECIFIED, runner_part)


def runner_error(found: WeftError) -> WeftError:
    """Returns the error of a failed call to a runner. CANCELLED becomes WORKER_LOST: the runner cancelled the call."""
    if found.retry_after_seconds is not None:
        found.retry_after_seconds = min(found.retry_after_seconds, MAX_RETRY_AFTER_SECONDS)
    if found.reason is Reason.CANCELLED:
        return WeftError(Reason.WORKER_LOST, "the runner dropped the request")
    if found.reason is Reason.UNAUTHENTICATED:
        # The gateway has checked the caller's key.
        return WeftError(Reason.BACKEND_ERROR, "the runner refused the call of the mesh")
    if found.reason is Reason.DEADLINE_EXCEEDED:
        found.message = "the answer was not complete before the deadline of the request or of its route"
    return found


def require_cancelled(why: WeftError | None = None) -> None:
    """Raises an error for a cancelled call to a runner unless this task itself was cancelled.

    The error is `why` if the request was cancelled by its id, else WORKER_LOST: gRPC also reports a call as cancelled
    if its channel was closed.
    """
    if not task_is_cancelled():
        raise why or WeftError(Reason.WORKER_LOST, "the connection to the runner was closed")


def reported_error(rejection: WeftError, attempt: WeftError | None) -> WeftError:
    """Returns the error for the caller: the attempt's, if the scheduler rejects with the same reason after it.

    A request that waited in vain for a provider's limit to end gets the provider's words.
    """
    if attempt is None:
        return rejection
    is_limit = attempt.reason is Reason.RATE_LIMIT_EXCEEDED and rejection.reason is Reason.QUEUE_TIMEOUT
    return attempt if is_limit or attempt.reason is rejection.reason else rejection


def _reason_of(error: Exception) -> Reason:
    return error.reason if isinstance(error, WeftError) else Reason.INTERNAL
