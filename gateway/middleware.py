"""The outermost ASGI middleware: request ids, authentication, error envelopes, and request metrics."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.auth.authentication import Gate
from gateway.config import GatewayConfig
from gateway.errors import (
    ClientGoneError,
    Dialect,
    dialect_of,
    envelope,
    error_headers,
    http_status,
    internal_error,
    shutting_down,
)
from gateway.intake.headers import headers_of, request_id_of, validate_head
from gateway.metrics import GatewayMetrics
from gateway.request_facts import FACTS_KEY, RequestFacts
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger

TASK_HEADER = b"x-weft-task-id"

log = get_logger("weft.gateway")


class EdgeMiddleware:
    """Wraps the application. Answers its errors, unless the status is already sent."""

    def __init__(
        self, app: ASGIApp, *, config: GatewayConfig, metrics: GatewayMetrics, clock: Clock, gate: Gate
    ) -> None:
        self._app = app
        self._gate = gate
        self._config = config
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = headers_of(scope)
        dialect = dialect_of(scope["path"], headers)
        facts = RequestFacts(request_id_of(headers), self._clock.monotonic(), dialect=dialect)
        scope[FACTS_KEY] = facts
        sender = _IdentifyingSender(send, facts)
        try:
            await self._serve(scope, receive, sender, facts)
        finally:
            self._metrics.request_ended(facts, self._clock.monotonic() - facts.arrived)
            _drop_traceback(facts.error)

    async def _serve(self, scope: Scope, receive: Receive, sender: "_IdentifyingSender", facts: RequestFacts) -> None:
        try:
            validate_head(scope, self._config)
            facts.principal = self._gate.admit(scope)
            await self._app(scope, receive, sender)
        except ClientGoneError as error:
            facts.error, facts.status = error, http_status(error)
        except WeftError as error:
            await self._answer(error, sender, facts)
        except asyncio.CancelledError:
            # Only the end of the grace period at shutdown cancels from outside; this is the task's last step.
            await self._answer(shutting_down(), sender, facts)
        except Exception:
            log.exception("request failed unexpectedly", request_id=facts.request_id)
            await self._answer(internal_error(), sender, facts)

    async def _answer(self, error: WeftError, sender: "_IdentifyingSender", facts: RequestFacts) -> None:
        facts.error = error
        if not facts.was_dispatched:
            log.info("refused", request_id=facts.request_id, reason=error.reason.name.lower(), message=error.message)
        if facts.status:
            # The response has begun and cannot be replaced: raising aborts the connection, instead of a normal end.
            raise error
        body = envelope(error, facts.request_id, facts.dialect)
        await sender(
            {"type": "http.response.start", "status": http_status(error), "headers": error_headers(error, body)}
        )
        await sender({"type": "http.response.body", "body": body})


def _drop_traceback(error: WeftError | None) -> None:
    """Drop the traceback of an error: its frames hold the body, and the request's facts hold the error.

    Measured: the 10 MB of a refused body stay until the next full collection, which may be hours away.
    """
    if error is not None:
        error.__traceback__ = error.__cause__ = error.__context__ = None


class _IdentifyingSender:
    """Adds the ids of request and task to the response headers and records the status."""

    __slots__ = ("_facts", "_send")

    def __init__(self, send: Send, facts: RequestFacts) -> None:
        self._send = send
        self._facts = facts

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._facts.status = message["status"]
            request_id = self._facts.request_id.encode("ascii")
            message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            if self._facts.task_id:
                message["headers"].append((TASK_HEADER, self._facts.task_id.encode("ascii")))
            if self._facts.dialect is Dialect.ANTHROPIC:
                message["headers"].append((b"request-id", request_id))
        await self._send(message)
