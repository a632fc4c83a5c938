"""Running requests: what all kinds share (trace, placement, receipt), and the streamed kinds, generation and speech."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import grpc

from weft.api.common.v1 import agent_behaviour_pb2, audio_pb2, chat_pb2, event_pb2, receipt_pb2
from weft.api.runner.v1 import (
    generation_service_pb2,
    generation_service_pb2_grpc,
    model_call_service_pb2,
    model_call_service_pb2_grpc,
    serve_options_pb2,
    ticket_pb2,
)
from weft.dispatch.agents import agent_name_of, require_chat, resolve
from weft.dispatch.fleet import FleetSource, FleetView
from weft.dispatch.frames import Frame, GenerationPayload, has_content
from weft.dispatch.parameter_checks import serve_options
from weft.dispatch.payload_description import Payload, affinity_key, describe
from weft.dispatch.placement import Grant, LoadingModel, PlacementPort, PlacementRequest, WaitingInQueue
from weft.dispatch.reconnecting_placement import ReconnectConfig, ReconnectingPlacement
from weft.dispatch.request_trace import RequestContext, RequestTrace, log_receipt
from weft.kernel.address import metadata_of
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import ChannelPool, error_from_call
from weft.kernel.telemetry import TRACEPARENT

if TYPE_CHECKING:
    from weft.api.runner.v1.generation_service_pb2_grpc import GenerationServiceAsyncStub
    from weft.api.runner.v1.model_call_service_pb2_grpc import ModelCallServiceAsyncStub


@dataclass(frozen=True, slots=True)
class CallDeps:
    """Dependencies of every call of one dispatcher."""

    placement: PlacementPort
    channels: ChannelPool
    clock: Clock
    steady: ReconnectConfig
    fleet: FleetSource | None

    def view(self) -> FleetView:
        """Returns the current view of the mesh; empty without a fleet."""
        return FleetView(revision=1) if self.fleet is None else self.fleet.view

    def may_leave(self, grant: Grant) -> bool:
        """Whether using a grant may send bytes off the premises.

        For models that are not known here yet, the ticket decides.
        """
        known = self.view().models.get(grant.model)
        if known is None or known.expected:
            return ticket_pb2.TicketClaims.FromString(grant.claims).allow_remote
        return known.remote


class RequestCall:
    """The common part of all requests: trace, placement, receipt."""

    def __init__(self, tools: CallDeps, context: RequestContext) -> None:
        self._tools = tools
        self._context = context
        self._trace = RequestTrace(context, tools.clock.monotonic())
        self._receipt: receipt_pb2.Receipt | None = None

    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        """The receipt, once the request has ended; None before."""
        return self._receipt

    def read_whole(self, *, whole: bool) -> None:
        """Sets whether the answer is read only when complete, from the next attempt on."""
        self._context = self._trace.context = replace(self._context, whole=whole)

    def _place(
        self, payload: Payload, behaviour: agent_behaviour_pb2.AgentBehaviour | None = None
    ) -> ReconnectingPlacement:
        context = self._context
        salt = f"{context.tenant}\0{context.handling.cache_tag}"
        description = describe(payload, salt=salt, behaviour=behaviour)
        request = PlacementRequest(
            request_id=context.request_id,
            tenant=context.tenant,
            model=context.model,
            operation=context.operation,
            priority=context.priority,
            names_priority=context.names_priority,
            allow_remote=context.allow_remote,
            seconds_left=self._seconds_to_deadline(),
            traceparent=context.traceparent,
            prompt_tokens=description.prompt_tokens,
            max_output_tokens=description.max_output_tokens,
            skills=description.skills,
            tools=description.tools,
            affinity_key=affinity_key(context.session, context.tenant),
            prefix_digests=description.prefix_digests,
            client_id=context.client_id,
        )
        return ReconnectingPlacement(self._tools.placement, request, self._tools.clock, self._tools.steady)

    def _seconds_left(self, grant: Grant) -> float | None:
        """Returns the time limit of an attempt that starts now, from the caller's deadline and the request's route."""
        left = [] if grant.seconds_left is None else [grant.seconds_left]
        own = self._seconds_to_deadline()
        if own is not None:
            left.append(own)
        return max(0.0, min(left)) if left else None

    def _seconds_to_deadline(self) -> float | None:
        """Returns the time to the caller's deadline; None: there is none."""
        if self._context.timeout_seconds is None:
            return None
        return max(0.0, self._context.timeout_seconds - (self._tools.clock.monotonic() - self._trace.arrived))

    def _options(self, grant: Grant) -> serve_options_pb2.ServeOptions:
        handling = self._context.handling
        if handling.keep_alive_seconds is None:
            handling = replace(handling, keep_alive_seconds=grant.keep_alive_seconds)
        priority = self._context.priority if grant.priority is None else grant.priority
        return serve_options(handling, priority, whole=self._context.whole)

    def _metadata(self, grant: Grant) -> tuple[tuple[str, str], ...]:
        about = (("x-request-id", self._context.request_id), (TRACEPARENT, self._context.traceparent))
        return about + metadata_of(grant.address)

    async def _fail_attempt(self, placement: ReconnectingPlacement, grant: Grant, error: WeftError) -> None:
        self._trace.note_attempt_failed(error.reason)
        await placement.report_attempt_failed(grant.attempt, error.reason)

    async def _fail_attempt_or_raise(self, placement: ReconnectingPlacement, grant: Grant, error: WeftError) -> None:
        """Reports a failed attempt; raises its error if content was already sent."""
        if self._trace.first_content is None:
            await self._fail_attempt(placement, grant, error)
            return
        self._trace.note_attempt_failed(error.reason)
        error.metadata["content_started"] = "true"
        raise error

    def _close(self, reason: Reason, runner_part: receipt_pb2.Receipt | None) -> receipt_pb2.Receipt:
        now = self._tools.clock.monotonic()
        self._receipt = self._trace.receipt(reason, runner_part, now)
        log_receipt(self._context, self._receipt, now - self._trace.arrived)
        return self._receipt

    def _close_failed(self, error: Exception) -> receipt_pb2.Receipt:
        """Returns the receipt of a failed request; a finished request keeps its own."""
        if self._receipt is None:
            return self._close(_reason_of(error), None)
        return self._receipt

    async def _report_failed(self, placement: ReconnectingPlacement, error: Exception) -> None:
        """Reports the failure to the router, which keeps it for `weft explain`."""
        await placement.report_finished(_reason_of(error), self._close_failed(error))

    def _close_left(self) -> None:
        """Writes the receipt of a request whose caller left, or whose deadline passed, unless it has one."""
        if self._receipt is None:
            is_late = self._seconds_to_deadline() == 0
            self._close(Reason.DEADLINE_EXCEEDED if is_late else Reason.CANCELLED, None)


def waiting_event(decision: WaitingInQueue | LoadingModel) -> event_pb2.InferenceEvent:
    """The client's event for a decision of the scheduler."""
    event = event_pb2.InferenceEvent()
    if isinstance(decision, WaitingInQueue):
        event.queued.position = decision.position
        event.queued.reason = decision.reason
        if decision.eta_seconds is not None:
            event.queued.eta.FromNanoseconds(int(decision.eta_seconds * 1e9))
        return event
    event.loading.stage = decision.stage
    if decision.progress is not None:
        event.loading.progress = decision.progress
    if decision.eta_seconds is not None:
        event.loading.eta.FromNanoseconds(int(decision.eta_seconds * 1e9))
    return event


def runner_error(error: grpc.aio.AioRpcError) -> WeftError:
    """Returns the error of a failed call to a runner; a cancelled call was cancelled by the runner, not here."""
    found = error_from_call(error, Reason.WORKER_LOST)
    if found.reason is Reason.CANCELLED:
        return WeftError(Reason.WORKER_LOST, "the runner dropped the request")
    if found.reason is Reason.DEADLINE_EXCEEDED:
        found.message = "the answer was not complete before the deadline of the request or of its route"
    return found


def require_cancelled() -> None:
    """Raises WORKER_LOST for a cancelled call to a runner unless this task was really cancelled.

    gRPC also reports a call as cancelled whose channel was closed under it.
    """
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        raise WeftError(Reason.WORKER_LOST, "the connection to the runner was closed")


def reported_error(rejection: WeftError, attempt: WeftError | None) -> WeftError:
    """The error for the caller: a scheduler that gives up after a failed attempt repeats only the attempt's reason."""
    return attempt if attempt is not None and attempt.reason is rejection.reason else rejection


def _reason_of(error: Exception) -> Reason:
    return error.reason if isinstance(error, WeftError) else Reason.INTERNAL


def ticket_of(grant: Grant) -> ticket_pb2.Ticket:
    """Returns the ticket of a grant."""
    return ticket_pb2.Ticket(claims=grant.claims, mac=grant.mac)


SNAPSHOT_CHECK_SECONDS = 0.05
"""Interval between looks whether the mesh is known; they end at `ReconnectConfig.router_outage_limit_seconds`."""


class GenerationCall(RequestCall):
    """A running generation."""

    def __init__(self, tools: CallDeps, context: RequestContext, payload: GenerationPayload) -> None:
        super().__init__(tools, context)
        self._payload = payload
        self._behaviour: agent_behaviour_pb2.AgentBehaviour | None = None

    async def frames(self) -> AsyncGenerator[Frame]:
        """Yields every frame of events, `finished` in the last one.

        Raises the WeftError that ended the request; `content_started` in its metadata means that content was sent
        before it. Leaving the iterator (aclose, cancel) cancels the runner's work.
        """
        try:
            await self._until_agents_are_known()
            self._resolve_agent()
            async with self._place(self._payload, self._behaviour) as placement:
                try:
                    async with aclosing(self._attempts(placement)) as frames:
                        async for frame in frames:
                            yield frame
                except Exception as error:
                    await self._report_failed(placement, error)
                    raise
                await placement.report_finished(Reason.UNSPECIFIED, self._receipt)
        except Exception as error:
            self._close_failed(error)
            raise
        finally:
            self._close_left()

    async def _until_agents_are_known(self) -> None:
        """Wait for the first snapshot of the mesh: a process that has just started knows no agent yet."""
        if agent_name_of(self._context.model) is None:
            return
        clock, began = self._tools.clock, self._tools.clock.monotonic()
        limit, own = self._tools.steady.router_outage_limit_seconds, self._seconds_to_deadline()
        ends_at = began + (limit if own is None else min(limit, own))
        while self._tools.view().revision == 0 and clock.monotonic() < ends_at:
            await clock.sleep(SNAPSHOT_CHECK_SECONDS)

    def _resolve_agent(self) -> None:
        """Replaces the request for an agent by one to its model, for every attempt."""
        if isinstance(self._payload, chat_pb2.ChatPayload):
            found = resolve(self._tools.view(), self._context, self._payload)
            if found is not None:
                self._context = self._trace.context = found.context
                self._payload = found.payload
                self._behaviour = found.behaviour
        else:
            require_chat(self._context)

    async def _attempts(self, placement: ReconnectingPlacement) -> AsyncGenerator[Frame]:
        last_error: WeftError | None = None
        while True:
            try:
                decision = await placement.next_decision()
            except WeftError as rejection:
                raise reported_error(rejection, last_error) from rejection
            now = self._tools.clock.monotonic()
            if not isinstance(decision, Grant):
                self._trace.note_waiting(decision, now)
                yield [waiting_event(decision)]
                continue
            self._trace.note_grant(decision, now, remote=self._tools.may_leave(decision))
            try:
                async with aclosing(self._attempt(placement, decision)) as frames:
                    async for frame in frames:
                        yield frame
            except WeftError as error:
                await self._fail_attempt_or_raise(placement, decision, error)
                last_error = error
            else:
                return

    async def _attempt(self, placement: ReconnectingPlacement, grant: Grant) -> AsyncGenerator[Frame]:
        started = False
        call = await self._call_runner(grant)
        try:
            # Not `async for`: a call that was iterated is a cycle, which only the garbage collector ends.
            while (response := await call.read()) is not grpc.aio.EOF:
                frame = list(cast("generation_service_pb2.GenerateResponse", response).events)
                if not started and has_content(frame):
                    started = True
                    self._trace.note_first_content(self._tools.clock.monotonic())
                    await placement.report_first_content(grant.attempt)
                last = frame[-1].WhichOneof("event") if frame else None
                if last == "tool_call":
                    self._trace.note_tool_calls(frame)
                elif last == "usage":
                    self._trace.usage = frame[-1].usage
                elif last == "finished":
                    receipt = self._close(Reason.UNSPECIFIED, frame[-1].finished.receipt)
                    frame[-1].finished.receipt.CopyFrom(receipt)
                    yield frame
                    return
                yield frame
        except grpc.aio.AioRpcError as error:
            raise runner_error(error) from error
        except asyncio.CancelledError:
            require_cancelled()
            raise
        finally:
            call.cancel()
        raise WeftError(Reason.WORKER_LOST, "the runner ended the stream without a result")

    async def _call_runner(
        self, grant: Grant
    ) -> "grpc.aio.UnaryStreamCall[generation_service_pb2.GenerateRequest, generation_service_pb2.GenerateResponse]":
        channel = await self._tools.channels.get(grant.address)
        stub = cast("GenerationServiceAsyncStub", generation_service_pb2_grpc.GenerationServiceStub(channel))
        request = generation_service_pb2.GenerateRequest(
            ticket=ticket_of(grant),
            behaviour=self._behaviour,
            agent=self._context.agent,
            options=self._options(grant),
        )
        if isinstance(self._payload, chat_pb2.ChatPayload):
            request.chat.CopyFrom(self._payload)
        else:
            request.completion.CopyFrom(self._payload)
        return stub.Generate(request, timeout=self._seconds_left(grant), metadata=self._metadata(grant))


@dataclass(frozen=True, slots=True)
class SpeechPiece:
    """A chunk of the recording."""

    data: bytes
    media_type: str
    """Media type of the recording; empty in all chunks but the first."""


class SpeechCall(RequestCall):
    """A running speech request."""

    def __init__(self, tools: CallDeps, context: RequestContext, payload: audio_pb2.SpeechPayload) -> None:
        super().__init__(tools, context)
        self._payload = payload

    async def pieces(self) -> AsyncGenerator[SpeechPiece]:
        """Yields every chunk in order, at least one, none empty.

        Raises the WeftError that ended the request; `content_started` in its metadata means that chunks were sent
        before it. Leaving the iterator (aclose, cancel) cancels the runner's work.
        """
        try:
            require_chat(self._context)
            async with self._place(self._payload) as placement:
                try:
                    async with aclosing(self._attempts(placement)) as pieces:
                        async for piece in pieces:
                            yield piece
                except Exception as error:
                    await self._report_failed(placement, error)
                    raise
                await placement.report_finished(Reason.UNSPECIFIED, self._receipt)
        except Exception as error:
            self._close_failed(error)
            raise
        finally:
            self._close_left()

    async def _attempts(self, placement: ReconnectingPlacement) -> AsyncGenerator[SpeechPiece]:
        last_error: WeftError | None = None
        while True:
            try:
                decision = await placement.next_decision()
            except WeftError as rejection:
                raise reported_error(rejection, last_error) from rejection
            now = self._tools.clock.monotonic()
            if not isinstance(decision, Grant):
                self._trace.note_waiting(decision, now)
                continue
            self._trace.note_grant(decision, now, remote=self._tools.may_leave(decision))
            try:
                async with aclosing(self._attempt(placement, decision)) as pieces:
                    async for piece in pieces:
                        yield piece
            except WeftError as error:
                await self._fail_attempt_or_raise(placement, decision, error)
                last_error = error
            else:
                return

    async def _attempt(self, placement: ReconnectingPlacement, grant: Grant) -> AsyncGenerator[SpeechPiece]:
        channel = await self._tools.channels.get(grant.address)
        stub = cast("ModelCallServiceAsyncStub", model_call_service_pb2_grpc.ModelCallServiceStub(channel))
        request = model_call_service_pb2.SpeakRequest(
            ticket=ticket_of(grant), payload=self._payload, options=self._options(grant)
        )
        call = stub.Speak(request, timeout=self._seconds_left(grant), metadata=self._metadata(grant))
        media_type, is_first = "", True
        try:
            async for response in call:
                media_type = media_type or response.media_type
                if response.data:
                    if is_first:
                        self._trace.note_first_content(self._tools.clock.monotonic())
                        await placement.report_first_content(grant.attempt)
                    yield SpeechPiece(response.data, media_type if is_first else "")
                    is_first = False
                if response.HasField("receipt"):
                    if is_first:
                        break
                    self._close(Reason.UNSPECIFIED, response.receipt)
                    return
        except grpc.aio.AioRpcError as error:
            raise runner_error(error) from error
        except asyncio.CancelledError:
            require_cancelled()
            raise
        finally:
            call.cancel()
        raise WeftError(Reason.WORKER_LOST, "the runner ended the stream without a result")
