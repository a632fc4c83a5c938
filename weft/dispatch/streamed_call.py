"""A generation under way: frames of a runner, handed on untouched."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import grpc

from weft.api.common.v1 import agent_behaviour_pb2, audio_pb2, chat_pb2
from weft.api.runner.v1 import (
    generation_service_pb2,
    generation_service_pb2_grpc,
    model_call_service_pb2,
    model_call_service_pb2_grpc,
)
from weft.dispatch.agents import agent_name_of, require_chat, resolve
from weft.dispatch.frames import Frame, GenerationPayload, has_content
from weft.dispatch.placement import Grant
from weft.dispatch.reconnecting_placement import ReconnectingPlacement
from weft.dispatch.request_call import (
    CallDeps,
    RequestCall,
    reported_error,
    require_cancelled,
    runner_error,
    ticket_of,
    waiting_event,
)
from weft.dispatch.request_trace import RequestContext
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

if TYPE_CHECKING:
    from weft.api.runner.v1.generation_service_pb2_grpc import GenerationServiceAsyncStub
    from weft.api.runner.v1.model_call_service_pb2_grpc import ModelCallServiceAsyncStub


SNAPSHOT_CHECK_SECONDS = 0.05
"""Interval between looks whether the mesh is known; they end at `ReconnectConfig.router_outage_limit_seconds`."""


class GenerationCall(RequestCall):
    """A generation under way."""

    def __init__(self, tools: CallDeps, context: RequestContext, payload: GenerationPayload) -> None:
        super().__init__(tools, context)
        self._payload = payload
        self._behaviour: agent_behaviour_pb2.AgentBehaviour | None = None

    async def frames(self) -> AsyncGenerator[Frame]:
        """Every frame of events, `finished` in the last one.

        Raises the WeftError that ended the request; `content_started` in its metadata says that content went out
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
        """From here on the request is its agent's model's, in every attempt."""
        if isinstance(self._payload, chat_pb2.ChatPayload):
            found = resolve(self._tools.view(), self._context, self._payload)
            if found is not None:
                self._context = self._journey.context = found.context
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

    async def _attempt(self, placement: ReconnectingPlacement, grant: Grant) -> AsyncGenerator[Frame]:
        started = False
        call = await self._call_runner(grant)
        try:
            # Not `async for`: a call that was iterated is a cycle, which only the garbage collector ends.
            while (response := await call.read()) is not grpc.aio.EOF:
                frame = list(cast("generation_service_pb2.GenerateResponse", response).events)
                if not started and has_content(frame):
                    started = True
                    self._journey.note_first_content(self._tools.clock.monotonic())
                    await placement.report_first_content(grant.attempt)
                last = frame[-1].WhichOneof("event") if frame else None
                if last == "tool_call":
                    self._journey.note_tool_calls(frame)
                elif last == "usage":
                    self._journey.usage = frame[-1].usage
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
    """Some bytes of the recording."""

    data: bytes
    media_type: str
    """Media type of the recording; empty in all chunks but the first."""


class SpeechCall(RequestCall):
    """A recording under way."""

    def __init__(self, tools: CallDeps, context: RequestContext, payload: audio_pb2.SpeechPayload) -> None:
        super().__init__(tools, context)
        self._payload = payload

    async def pieces(self) -> AsyncGenerator[SpeechPiece]:
        """Every chunk in order, at least one, none empty.

        Raises the WeftError that ended the request; `content_started` in its metadata says that chunks went out before
        it. Leaving the iterator (aclose, cancel) cancels the runner's work.
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
                self._journey.note_waiting(decision, now)
                continue
            self._journey.note_grant(decision, now, remote=self._tools.may_leave(decision))
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
                        self._journey.note_first_content(self._tools.clock.monotonic())
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
