"""Speech under way: the bytes of a recording as the engine makes them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import grpc

from weft.api.common.v1 import audio_pb2
from weft.api.runner.v1 import model_call_service_pb2, model_call_service_pb2_grpc
from weft.dispatch.agents import require_chat
from weft.dispatch.journey import RequestContext
from weft.dispatch.port import Grant
from weft.dispatch.request_call import CallTools, RequestCall, require_cancelled, runner_error, ticket_of, told_error
from weft.dispatch.steady import SteadyPlacement
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

if TYPE_CHECKING:
    from weft.api.runner.v1.model_call_service_pb2_grpc import ModelCallServiceAsyncStub


@dataclass(frozen=True, slots=True)
class SpeechPiece:
    """Some bytes of the recording."""

    data: bytes
    media_type: str
    """Of the whole recording; empty in all pieces but the first."""


class SpeechCall(RequestCall):
    """A recording under way."""

    def __init__(self, tools: CallTools, context: RequestContext, payload: audio_pb2.SpeechPayload) -> None:
        super().__init__(tools, context)
        self._payload = payload

    async def pieces(self) -> AsyncGenerator[SpeechPiece]:
        """Every piece in order, at least one, none without bytes.

        Raises the WeftError that ended the request; `content_started` in its metadata says that pieces went out before
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

    async def _attempts(self, placement: SteadyPlacement) -> AsyncGenerator[SpeechPiece]:
        last_error: WeftError | None = None
        while True:
            try:
                decision = await placement.next_decision()
            except WeftError as rejection:
                raise told_error(rejection, last_error) from rejection
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

    async def _attempt(self, placement: SteadyPlacement, grant: Grant) -> AsyncGenerator[SpeechPiece]:
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
