"""The chunked response that sends generated speech. A recording that breaks off aborts the connection."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.deps import InferenceDeps
from gateway.errors import ClientGoneError
from gateway.http.disconnect import abort_connection, deadline_passed, interrupt_on_disconnect
from gateway.ports import Speech
from gateway.request_facts import facts_of
from weft.dispatch.request_call import SpeechPiece
from weft.kernel.errors import WeftError
from weft.kernel.interrupt import Interruptible
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason

log = get_logger("weft.gateway")

DEFAULT_MEDIA_TYPE = "application/octet-stream"


class SlowSpeechReaderError(ClientGoneError):
    """The caller is connected and does not read."""

    def __init__(self) -> None:
        super().__init__("the client did not read its recording")


class SpeechAnswer(Response):
    """Sends one recording.

    A failure before the first byte is raised and becomes a status. After it, the connection is aborted: audio cannot
    hold an error, and a normal end of the chunked body would make the recording look complete.
    """

    def __init__(self, deps: InferenceDeps, begin: Callable[[], Speech], *, cut_off_seconds: float) -> None:
        self.status_code = 200
        self.background: Any = None
        self._deps = deps
        self._begin = begin
        self._cut_off_seconds = cut_off_seconds
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the recording until it is complete, fails, or the caller disconnects."""
        facts = facts_of(scope)
        facts.was_dispatched = True
        try:
            with Interruptible() as block:
                listener = asyncio.create_task(interrupt_on_disconnect(receive, block))
                cut_off = asyncio.get_running_loop().call_later(self._cut_off_seconds, deadline_passed, block)
                try:
                    await self._pump(send)
                finally:
                    cut_off.cancel()
                    listener.cancel()
        except ClientGoneError:
            raise
        except WeftError as error:
            if not self._has_begun:
                raise
            facts.error = error
            log.warning("a recording broke off", request_id=facts.request_id, reason=error.reason.name.lower())
            await abort_connection(scope, receive)

    async def _pump(self, send: Send) -> None:
        async with aclosing(self._begin().pieces()) as pieces:
            async for piece in pieces:
                if not self._has_begun:
                    await send(_head(piece))
                    self._has_begun = True
                await self._write(send, piece.data, more=True)
        if not self._has_begun:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the model sent a recording without a byte")
        await self._write(send, b"", more=False)

    async def _write(self, send: Send, data: bytes, *, more: bool) -> None:
        try:
            async with asyncio.timeout(self._deps.config.write_timeout_seconds):
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise SlowSpeechReaderError from None


def _head(first: SpeechPiece) -> dict[str, Any]:
    media_type = first.media_type.encode("latin-1", "replace") or DEFAULT_MEDIA_TYPE.encode()
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", media_type)]}
