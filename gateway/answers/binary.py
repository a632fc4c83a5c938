"""A response of bytes: a file, or generated speech."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.answers.sse_writer import SlowReaderError
from gateway.errors import ClientGoneError
from gateway.http.disconnect import WhileConnected, abort_connection
from gateway.request_facts import facts_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import within

Headers = list[tuple[bytes, bytes]]

log = get_logger("weft.gateway")


class BinaryAnswer(Response):
    """Sends the chunks of a file or a recording.

    A failure before the first byte becomes an HTTP status. A later one aborts the connection, because the bytes cannot
    hold an error and a normal end would make them look complete. A caller that does not read is disconnected.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        headers: Callable[[], Headers],
        *,
        kind: str,
        write_timeout_seconds: float,
        cut_off_seconds: float | None = None,
    ) -> None:
        """`headers` is called with the first chunk, or at the end if there is none; `kind`, such as "file", is logged.

        `cut_off_seconds`: maximum duration of the response; None: unlimited.
        """
        self.status_code = 200
        self.background: Any = None
        self._chunks = chunks
        self._header_source = headers
        self._kind = kind
        self._write_timeout_seconds = write_timeout_seconds
        self._cut_off_seconds = cut_off_seconds
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the chunks until the answer is complete or fails, or the caller disconnects."""
        facts = facts_of(scope)
        try:
            await self._run(scope, receive, send)
        except SlowReaderError:
            await abort_connection(scope, receive)
            raise
        except ClientGoneError:
            raise
        except WeftError as error:
            if not self._has_begun:
                raise
            facts.error = error
            event = f"a {self._kind} was interrupted"
            log.warning(event, request_id=facts.request_id, reason=error.reason.name.lower())
            await abort_connection(scope, receive)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        with WhileConnected(scope, receive, cut_off_seconds=self._cut_off_seconds):
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    await self._write(send, chunk, more=True)
            await self._write(send, b"", more=False)

    async def _write(self, send: Send, data: bytes, *, more: bool) -> None:
        if not self._has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": self._header_source()})
            self._has_begun = True
        try:
            message = {"type": "http.response.body", "body": data, "more_body": more}
            await within(self._write_timeout_seconds, send(message))
        except TimeoutError:
            raise SlowReaderError(self._kind) from None
