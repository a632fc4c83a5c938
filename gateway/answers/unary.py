"""An answer in one piece. The work stops as soon as nobody waits for it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ClientGoneError
from gateway.http.disconnect import deadline_passed, listen_for_hang_up
from weft.kernel.interrupt import Interruptible


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """A complete body and the headers that go with it."""

    body: bytes
    headers: list[tuple[bytes, bytes]]
    media_type: bytes = b"application/json"


class UnaryAnswer(Response):
    """Produces its answer only when it is sent, and cancels the producer when the caller hangs up or time is over.

    Whatever the producer raises is raised before anything is sent, so that it still becomes a status.
    """

    def __init__(self, produce: Callable[[], Awaitable[JsonAnswer]], *, cut_off_seconds: float) -> None:
        self.status_code = 200
        self.background: Any = None
        self._produce = produce
        self._cut_off_seconds = cut_off_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Produce and send."""
        answer = await self._produced(scope, receive)
        headers = [
            (b"content-type", answer.media_type),
            (b"content-length", str(len(answer.body)).encode()),
            *answer.headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})

    async def _produced(self, scope: Scope, receive: Receive) -> JsonAnswer:
        with Interruptible() as block:
            stop_listening = listen_for_hang_up(scope, receive, block)
            cut_off = asyncio.get_running_loop().call_later(self._cut_off_seconds, deadline_passed, block)
            try:
                return await self._produce()
            finally:
                cut_off.cancel()
                stop_listening()
        raise ClientGoneError  # pragma: no cover - the block returns or raises
