"""Runs a request: gets a grant, calls the runner itself, fails over before the first content, writes the receipt.

The router decides and never sees a token; the frames of a runner pass through here untouched.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import grpc

from weft.api.common.v1 import agent_behaviour_pb2, chat_pb2, embedding_pb2, event_pb2, receipt_pb2
from weft.api.runner.v1 import (
    embedding_service_pb2,
    embedding_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    serve_options_pb2,
    ticket_pb2,
)
from weft.dispatch.agents import require_chat, resolve
from weft.dispatch.description import Payload, affinity_key, describe
from weft.dispatch.fleet import FleetSource, FleetView
from weft.dispatch.frames import Frame, GenerationPayload, has_content
from weft.dispatch.handling import serve_options
from weft.dispatch.journey import Journey, RequestContext, log_receipt
from weft.dispatch.port import Grant, LoadingModel, PlacementPort, PlacementRequest, WaitingInQueue
from weft.dispatch.steady import SteadyConfig, SteadyPlacement
from weft.kernel.address import metadata_of
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import ChannelPool, error_from_call
from weft.kernel.telemetry import TRACEPARENT

if TYPE_CHECKING:
    from weft.api.runner.v1.embedding_service_pb2_grpc import EmbeddingServiceAsyncStub
    from weft.api.runner.v1.generation_service_pb2_grpc import GenerationServiceAsyncStub


@dataclass(frozen=True, slots=True)
class _Tools:
    placement: PlacementPort
    channels: ChannelPool
    clock: Clock
    steady: SteadyConfig
    fleet: FleetSource | None

    def view(self) -> FleetView:
        """What is known of the mesh; of no mesh, that there is nothing in it."""
        return FleetView(revision=1) if self.fleet is None else self.fleet.view

    def may_leave(self, grant: Grant) -> bool:
        """Whether using a grant may send bytes off the premises.

        The router may know models that are not known here yet: of those, the ticket says whether it lets bytes out.
        """
        known = self.view().models.get(grant.model)
        if known is None:
            return ticket_pb2.TicketClaims.FromString(grant.claims).allow_remote
        return known.remote


class Dispatcher:
    """Turns requests into calls. One per process that has callers: each gateway, each router."""

    def __init__(
        self,
        placement: PlacementPort,
        channels: ChannelPool,
        *,
        clock: Clock | None = None,
        steady: SteadyConfig | None = None,
        fleet: FleetSource | None = None,
    ) -> None:
        """`fleet` knows the agents; without one there are none."""
        self._tools = _Tools(placement, channels, clock or SystemClock(), steady or SteadyConfig(), fleet)

    def generate(self, context: RequestContext, payload: GenerationPayload) -> "GenerationCall":
        """A chat or text completion. Nothing happens until its frames are read."""
        return GenerationCall(self._tools, context, payload)

    def embed(self, context: RequestContext, payload: embedding_pb2.EmbeddingPayload) -> "EmbeddingCall":
        """An embedding. Nothing happens until its result is awaited."""
        return EmbeddingCall(self._tools, context, payload)


class _Call:
    """What generation and embedding share: the journey, the placement, the receipt."""

    def __init__(self, tools: _Tools, context: RequestContext) -> None:
        self._tools = tools
        self._context = context
        self._journey = Journey(context, tools.clock.monotonic())
        self._receipt: receipt_pb2.Receipt | None = None

    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        """What happened, once it is over; None before that."""
        return self._receipt

    def _place(self, payload: Payload, behaviour: agent_behaviour_pb2.AgentBehaviour | None = None) -> SteadyPlacement:
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
            seconds_left=context.timeout_seconds,
            traceparent=context.traceparent,
            prompt_tokens=description.prompt_tokens,
            max_output_tokens=description.max_output_tokens,
            skills=description.skills,
            tools=description.tools,
            affinity_key=affinity_key(context.session, context.tenant),
            prefix_digests=description.prefix_digests,
            client_id=context.client_id,
        )
        return SteadyPlacement(self._tools.placement, request, self._tools.clock, self._tools.steady)

    def _seconds_left(self, grant: Grant) -> float | None:
        """For an attempt that begins now: what the caller or the request's route leaves it, whichever is less."""
        left = [] if grant.seconds_left is None else [grant.seconds_left]
        if self._context.timeout_seconds is not None:
            left.append(self._context.timeout_seconds - (self._tools.clock.monotonic() - self._journey.arrived))
        return max(0.0, min(left)) if left else None

    def _options(self, grant: Grant) -> serve_options_pb2.ServeOptions:
        handling = self._context.handling
        if handling.keep_alive_seconds is None:
            handling = replace(handling, keep_alive_seconds=grant.keep_alive_seconds)
        return serve_options(handling, self._context.priority if grant.priority is None else grant.priority)

    def _metadata(self, grant: Grant) -> tuple[tuple[str, str], ...]:
        about = (("x-request-id", self._context.request_id), (TRACEPARENT, self._context.traceparent))
        return about + metadata_of(grant.address)

    async def _fail_attempt(self, placement: SteadyPlacement, grant: Grant, error: WeftError) -> None:
        self._journey.note_attempt_failed(error.reason)
        await placement.report_attempt_failed(grant.attempt, error.reason)

    def _close(self, reason: Reason, runner_part: receipt_pb2.Receipt | None) -> receipt_pb2.Receipt:
        now = self._tools.clock.monotonic()
        self._receipt = self._journey.receipt(reason, runner_part, now)
        log_receipt(self._context, self._receipt, now - self._journey.arrived)
        return self._receipt

    def _close_failed(self, error: Exception) -> receipt_pb2.Receipt:
        """The receipt of a request that an error ended; one that was over already keeps its own."""
        if self._receipt is None:
            return self._close(_reason_of(error), None)
        return self._receipt

    async def _report_failed(self, placement: SteadyPlacement, error: Exception) -> None:
        """Tell the router what became of it, for those who ask it later."""
        await placement.report_finished(_reason_of(error), self._close_failed(error))

    def _close_left(self) -> None:
        """The receipt of a request whose caller left, if nothing else has ended it."""
        if self._receipt is None:
            self._close(Reason.CANCELLED, None)


class GenerationCall(_Call):
    """A generation under way."""

    def __init__(self, tools: _Tools, context: RequestContext, payload: GenerationPayload) -> None:
        super().__init__(tools, context)
        self._payload = payload
        self._behaviour: agent_behaviour_pb2.AgentBehaviour | None = None

    async def frames(self) -> AsyncGenerator[Frame]:
        """Every frame of events, `finished` in the last one.

        Raises the WeftError that ended the request; `content_started` in its metadata says that content went out
        before it. Leaving the iterator (aclose, cancel) cancels the runner's work.
        """
        try:
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

    def _resolve_agent(self) -> None:
        """From here on the request is its agent's model's, in every attempt."""
        if isinstance(self._payload, chat_pb2.ChatPayload):
            found = resolve(self._tools.view(), self._context, self._payload)
            if found is not None:
                self._context = self._journey.context = found.context
                self._payload = found.payload
                self._behaviour = found.behaviour
        else:
            require_chat(self._context)

    async def _attempts(self, placement: SteadyPlacement) -> AsyncGenerator[Frame]:
        last_error: WeftError | None = None
        while True:
            try:
                decision = await placement.next_decision()
            except WeftError as rejection:
                raise _told(rejection, last_error) from rejection
            now = self._tools.clock.monotonic()
            if not isinstance(decision, Grant):
                self._journey.note_waiting(decision, now)
                yield [waiting_event(decision)]
                continue
            self._journey.note_grant(decision, now, remote=self._tools.may_leave(decision))
            try:
                async with aclosing(self._attempt(placement, decision)) as frames:
                    async for frame in frames:
                        yield frame
            except WeftError as error:
                await self._fail_attempt_or_raise(placement, decision, error)
                last_error = error
            else:
                return

    async def _fail_attempt_or_raise(self, placement: SteadyPlacement, grant: Grant, error: WeftError) -> None:
        if self._journey.first_content is None:
            await self._fail_attempt(placement, grant, error)
            return
        self._journey.note_attempt_failed(error.reason)
        error.metadata["content_started"] = "true"
        raise error

    async def _attempt(self, placement: SteadyPlacement, grant: Grant) -> AsyncGenerator[Frame]:
        started = False
        call = await self._call_runner(grant)
        try:
            async for response in call:
                frame = list(response.events)
                if not started and has_content(frame):
                    started = True
                    self._journey.note_first_content(self._tools.clock.monotonic())
                    await placement.report_first_content(grant.attempt)
                last = frame[-1].WhichOneof("event") if frame else None
                if last == "tool_call":
                    self._journey.note_tool_calls(frame)
                elif last == "finished":
                    receipt = self._close(Reason.UNSPECIFIED, frame[-1].finished.receipt)
                    frame[-1].finished.receipt.CopyFrom(receipt)
                    yield frame
                    return
                yield frame
        except grpc.aio.AioRpcError as error:
            raise _runner_error(error) from error
        finally:
            call.cancel()
        raise WeftError(Reason.WORKER_LOST, "the runner ended the stream without a result")

    async def _call_runner(
        self, grant: Grant
    ) -> "grpc.aio.UnaryStreamCall[generation_service_pb2.GenerateRequest, generation_service_pb2.GenerateResponse]":
        channel = await self._tools.channels.get(grant.address)
        stub = cast("GenerationServiceAsyncStub", generation_service_pb2_grpc.GenerationServiceStub(channel))
        request = generation_service_pb2.GenerateRequest(
            ticket=_ticket(grant),
            behaviour=self._behaviour,
            agent=self._context.agent,
            options=self._options(grant),
        )
        if isinstance(self._payload, chat_pb2.ChatPayload):
            request.chat.CopyFrom(self._payload)
        else:
            request.completion.CopyFrom(self._payload)
        return stub.Generate(request, timeout=self._seconds_left(grant), metadata=self._metadata(grant))


class EmbeddingCall(_Call):
    """An embedding under way."""

    def __init__(self, tools: _Tools, context: RequestContext, payload: embedding_pb2.EmbeddingPayload) -> None:
        super().__init__(tools, context)
        self._payload = payload

    async def result(self) -> list[embedding_pb2.Embedding]:
        """The vectors in input order. Raises the WeftError that ended the request."""
        try:
            require_chat(self._context)
            async with self._place(self._payload) as placement:
                try:
                    response = await self._attempts(placement)
                except Exception as error:
                    await self._report_failed(placement, error)
                    raise
                receipt = self._close(Reason.UNSPECIFIED, response.receipt)
                await placement.report_finished(Reason.UNSPECIFIED, receipt)
                return list(response.embeddings)
        except Exception as error:
            self._close_failed(error)
            raise
        finally:
            self._close_left()

    async def _attempts(self, placement: SteadyPlacement) -> embedding_service_pb2.EmbedResponse:
        last_error: WeftError | None = None
        while True:
            try:
                decision = await placement.next_decision()
            except WeftError as rejection:
                raise _told(rejection, last_error) from rejection
            now = self._tools.clock.monotonic()
            if not isinstance(decision, Grant):
                self._journey.note_waiting(decision, now)
                continue
            self._journey.note_grant(decision, now, remote=self._tools.may_leave(decision))
            try:
                return await self._attempt(decision)
            except WeftError as error:
                await self._fail_attempt(placement, decision, error)
                last_error = error

    async def _attempt(self, grant: Grant) -> embedding_service_pb2.EmbedResponse:
        channel = await self._tools.channels.get(grant.address)
        stub = cast("EmbeddingServiceAsyncStub", embedding_service_pb2_grpc.EmbeddingServiceStub(channel))
        request = embedding_service_pb2.EmbedRequest(
            ticket=_ticket(grant), payload=self._payload, options=self._options(grant)
        )
        try:
            return await stub.Embed(request, timeout=self._seconds_left(grant), metadata=self._metadata(grant))
        except grpc.aio.AioRpcError as error:
            raise _runner_error(error) from error


def waiting_event(decision: WaitingInQueue | LoadingModel) -> event_pb2.InferenceEvent:
    """The event that tells a client what a scheduler's word means."""
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


def _runner_error(error: grpc.aio.AioRpcError) -> WeftError:
    """Why a call to a runner failed. Our own cancel never gets here, so a cancelled call is the runner's doing."""
    found = error_from_call(error, Reason.WORKER_LOST)
    if found.reason is Reason.CANCELLED:
        return WeftError(Reason.WORKER_LOST, "the runner gave the request up")
    if found.reason is Reason.DEADLINE_EXCEEDED:
        found.message = "the answer was not complete before the deadline of the request or of its route"
    return found


def _told(rejection: WeftError, attempt: WeftError | None) -> WeftError:
    """What the caller is told: a scheduler that gives up after a failed attempt repeats only the attempt's reason."""
    return attempt if attempt is not None and attempt.reason is rejection.reason else rejection


def _reason_of(error: Exception) -> Reason:
    return error.reason if isinstance(error, WeftError) else Reason.INTERNAL


def _ticket(grant: Grant) -> ticket_pb2.Ticket:
    return ticket_pb2.Ticket(claims=grant.claims, mac=grant.mac)
