"""The response that sends a file. A file that breaks off aborts the connection."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.errors import ClientGoneError
from gateway.http.disconnect import abort_connection, interrupt_on_disconnect
from gateway.request_facts import facts_of
from weft.durable.batches import StoredFile
from weft.kernel.errors import WeftError
from weft.kernel.interrupt import Interruptible
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason

log = get_logger("weft.gateway")


class SlowFileReaderError(ClientGoneError):
    """The caller is connected and does not read."""

    def __init__(self) -> None:
        super().__init__("the client did not read its file")


class FileAnswer(Response):
    """Sends one file.

    A failure before the first byte is raised and becomes a status. After it, the connection is aborted: a file cannot
    hold an error, and a normal end would make it look complete.
    """

    def __init__(self, file: StoredFile, content: AsyncGenerator[bytes], *, write_timeout_seconds: float) -> None:
        self.status_code = 200
        self.background: Any = None
        self._file = file
        self._content = content
        self._write_timeout_seconds = write_timeout_seconds
        self._sent_bytes = -1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file until it is complete, fails, or the caller disconnects."""
        facts = facts_of(scope)
        try:
            with Interruptible() as block:
                listener = asyncio.create_task(interrupt_on_disconnect(receive, block))
                try:
                    await self._pump(send)
                finally:
                    listener.cancel()
        except SlowFileReaderError:
            await abort_connection(scope, receive)
            raise
        except ClientGoneError:
            raise
        except WeftError as error:
            if self._sent_bytes < 0:
                raise
            facts.error = error
            log.warning("a file broke off", request_id=facts.request_id, reason=error.reason.name.lower())
            await abort_connection(scope, receive)

    async def _pump(self, send: Send) -> None:
        async with aclosing(self._content) as pieces:
            async for piece in pieces:
                if max(0, self._sent_bytes) + len(piece) > self._file.size:
                    raise _other_size()
                await self._write(send, piece, more=True)
        if max(0, self._sent_bytes) != self._file.size:
            raise _other_size()
        await self._write(send, b"", more=False)

    async def _write(self, send: Send, data: bytes, *, more: bool) -> None:
        if self._sent_bytes < 0:
            await send(_head(self._file))
            self._sent_bytes = 0
        self._sent_bytes += len(data)
        try:
            async with asyncio.timeout(self._write_timeout_seconds):
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise SlowFileReaderError from None


def _other_size() -> WeftError:
    return WeftError(Reason.SERVICE_UNAVAILABLE, "what is kept of this file is not what came in")


def _head(file: StoredFile) -> dict[str, Any]:
    # A browser must save the file and not display it, whatever its content and name.
    name = quote(file.name, safe="")
    headers = [
        (b"content-type", b"application/octet-stream"),
        (b"content-length", str(file.size).encode()),
        (b"content-disposition", f"attachment; filename*=UTF-8''{name}".encode()),
        (b"x-content-type-options", b"nosniff"),
    ]
    return {"type": "http.response.start", "status": 200, "headers": headers}
