"""The two services of the picker, as generic handlers of Envoy's names: translation between streams and requests."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc
from starlette.types import Scope

from gateway.deps import InferenceDeps
from gateway.errors import envelope, error_headers, http_status, internal_error
from gateway.http.server_span import ServerSpans
from gateway.intake.body import BodyPace
from gateway.picker.ends import sight_of, sight_of_stream
from gateway.picker.engine_reach import proxy_of
from gateway.picker.intake import LaneIntake, scope_of
from gateway.picker.lane_request import GatewayTerms
from gateway.picker.lane_requests import LaneRequests
from gateway.picker.metrics import PickerMetrics
from gateway.picker.session import DirectAnswer, Headers, HttpRequest, PickerSession, Route, State
from gateway.picker.subset import allowed_in
from gateway.request_facts import ROUTE_KEY, facts_of
from gateway.visible_names import with_visible_names
from weft.api.envoy.v1 import access_log_pb2, external_processor_pb2
from weft.kernel.errors import WeftError
from weft.kernel.lane_names import (
    ACCESS_LOG_SERVICE,
    EXTERNAL_PROCESSOR,
    REASON_HEADER,
    REQUEST_ID_HEADER,
    TICKET_HEADER,
)
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.kernel.rpc_server.server import LocalServer
from weft.kernel.service import stop_tasks

log = get_logger("weft.picker")

Context = grpc.aio.ServicerContext[Any, Any]
_FAIRNESS_HEADERS = (b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id")
_TENANT_HEADER = b"x-tenant-id"
_UNAVAILABLE, _SHED = 503, 429
_FRAMING = b"content-length"
"""A header that the proxy sets itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolHooks:
    """What the picker does for gateways beyond weft's own Envoy."""

    for_conformance: bool = False
    """Conformance tests of gateways choose endpoints by a header, and are told which one served. Any caller could."""
    fairness_tenants: bool = False
    """See `PickerLimits.fairness_tenants`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intakes:
    """The intake of requests of weft's own Envoy, and that of other gateways, which reach endpoints alone."""

    own: LaneIntake
    foreign: LaneIntake


class ExternalProcessor:
    """Serves /envoy.service.ext_proc.v3.ExternalProcessor/Process."""

    def __init__(
        self,
        deps: InferenceDeps,
        intakes: Intakes,
        lane: LaneRequests,
        metrics: PickerMetrics,
        gateway: str,
        hooks: ProtocolHooks,
    ) -> None:
        """`gateway`: where the proxy sends what the lane cannot do, `ip:port`; empty: nowhere."""
        self._deps = deps
        self._intakes = intakes
        self._hooks = hooks
        self._lane = lane
        self._metrics = metrics
        self._gateway = gateway
        self._spans = ServerSpans(deps.tracing, deps.clock, deps.service)

    async def process(self, _messages: object, context: Context) -> None:
        """Serves one stream: one request of the proxy."""
        stream = _Stream(context, PickerSession(self._deps.config.max_body_bytes))
        stream.session.tells_served = self._hooks.for_conformance
        pace = BodyPace(self._deps.config, self._deps.config.body_timeout_seconds)
        try:
            while await self._serve_next(stream, pace):
                pass
        finally:
            self._note_end(stream)
            await stream.close()

    async def _serve_next(self, stream: "_Stream", pace: BodyPace) -> bool:
        """Serves the next message; returns whether another one may follow. No body is held while that is waited for."""
        message = await self._next(stream, pace)
        if message is None:
            return False
        try:
            request = await stream.take(message)
        except WeftError as error:
            await self._refuse(stream, error)
            return True
        return request is None or await self._pick(stream, request)

    async def _next(self, stream: "_Stream", pace: BodyPace) -> Any:
        """Returns the next message; None: none follows, or too little of the body has come and it is refused."""
        if stream.session.state is not State.BODY:
            return await stream.read()
        try:
            # The proxy passes a body on as it comes, and waits for the rest of it for ever.
            return await pace.next(stream.read(), stream.session.body_bytes)
        except WeftError as error:
            await self._refuse(stream, error)
            return None

    async def _refuse(self, stream: "_Stream", error: WeftError) -> None:
        """Answers a request that has not come whole."""
        scope = scope_of(stream.session.headers, self._deps.clock.monotonic())
        await stream.answer(_as_told(stream, error, self._refusal(scope, error)))

    def _note_end(self, stream: "_Stream") -> None:
        """The end of a stream is the end of its request, where the response came by."""
        session = stream.session
        if stream.placed_id and (session.promises_response or session.passed.status):
            self._lane.note_sight(sight_of_stream(stream.placed_id, session.passed))

    async def _pick(self, stream: "_Stream", request: HttpRequest) -> bool:
        """Answers a request; returns whether the proxy still listens."""
        scope = scope_of(self._with_tenant(stream, request.headers), self._deps.clock.monotonic())
        facts = facts_of(scope)
        self._spans.begin(scope, facts)
        try:
            route = await self._route(stream, scope, request)
        except WeftError as error:
            await stream.answer(_as_told(stream, error, self._refusal(scope, error)))
        except asyncio.CancelledError:
            if not stream.is_gone:
                raise
            return False
        except Exception:
            log.exception("request failed unexpectedly", request_id=facts.request_id)
            await stream.answer(self._refusal(scope, internal_error()))
        else:
            # The proxy may end the stream once it has the route, and with it this task, before the write returns.
            self._metrics.picked(facts.surface, "lane" if facts.was_dispatched else "gateway")
            await stream.route(route)
        finally:
            self._spans.end(scope, facts, self._deps.clock.monotonic())
        return True

    async def _route(self, stream: "_Stream", scope: Scope, request: HttpRequest) -> Route:
        is_foreign = stream.session.shows_responses
        work = (self._intakes.foreign if is_foreign else self._intakes.own).work_of(scope, request)
        if work is not None:
            allowed = allowed_in(request.metadata, request.headers, obeys_tests=self._hooks.for_conformance)
            terms = GatewayTerms(
                shows_responses=is_foreign, allowed=allowed, proxy=stream.proxy, connection=stream.peer
            )
            route = await self._lane.place(work, stream.watch, terms)
            stream.placed_id = facts_of(scope).request_id
            return route
        if is_foreign or not self._gateway:
            raise _no_gateway(scope)
        return Route(destinations=(self._gateway,), remove_headers=(TICKET_HEADER,))

    def _with_tenant(self, stream: "_Stream", headers: Headers) -> Headers:
        """Returns headers that name the tenant, where a trusted gateway has written whose turn it is."""
        if not (self._hooks.fairness_tenants and stream.session.shows_responses):
            return headers
        named = dict(headers)
        fairness = next((named[name] for name in _FAIRNESS_HEADERS if name in named), b"")
        return headers if not fairness or _TENANT_HEADER in named else (*headers, (_TENANT_HEADER, fairness))

    def _refusal(self, scope: Scope, error: WeftError) -> DirectAnswer:
        facts = facts_of(scope)
        error = with_visible_names(error, self._deps.fleet.view, facts.principal)
        reason = error.reason.name.lower()
        facts.error, facts.status = error, http_status(error)
        if not facts.was_dispatched:
            log.info("refused", request_id=facts.request_id, reason=reason, message=error.message)
        self._metrics.picked(facts.surface, reason)
        body = envelope(error, facts.request_id, facts.dialect)
        headers = [each for each in error_headers(error, body, facts.dialect) if each[0] != _FRAMING]
        headers += (
            (REQUEST_ID_HEADER.encode(), facts.request_id.encode("ascii")),
            (REASON_HEADER.encode(), error.reason.name.encode()),
        )
        return DirectAnswer(status=facts.status, headers=headers, body=body, details=f"weft_{reason}")


def _as_told(stream: "_Stream", error: WeftError, answer: DirectAnswer) -> DirectAnswer:
    """Returns an answer with the status of the endpoint-picker protocol: 429 for a request that is dropped.

    weft's own callers get 503 from a full queue, whichever way they come in.
    """
    is_shed = error.traits.grpc_code == "RESOURCE_EXHAUSTED" and answer.status == _UNAVAILABLE
    return replace(answer, status=_SHED) if is_shed and stream.session.shows_responses else answer


def _no_gateway(scope: Scope) -> WeftError:
    if ROUTE_KEY not in scope:
        return WeftError(Reason.NOT_FOUND, "the endpoint picker has no such endpoint (picker.gateway names no gateway)")
    words = "this request needs a gateway, which the endpoint picker does not know (picker.gateway)"
    return WeftError(Reason.UNSUPPORTED_OPERATION, words)


class _Stream:
    """A stream of one request. While that waits, it is read on: its end is the only sign that the caller left."""

    def __init__(self, context: Context, session: PickerSession) -> None:
        self._context = context
        self.session = session
        self._reading: asyncio.Task[None] | None = None
        self._is_routed = False
        self._writing: asyncio.Lock | None = None
        """gRPC takes one write at a time; None: nothing reads, and writes, beside the request."""
        self.placed_id = ""
        """The id of its request, once the lane carries it."""
        self.peer = context.peer()
        """See `GatewayTerms.connection`."""
        self.proxy = proxy_of(self.peer)
        """See `GatewayTerms.proxy`."""
        self.is_gone = False
        """Whether the stream ended while the request waited."""

    async def read(self) -> Any:
        """Returns the next message; None at the end."""
        if self._reading is not None:
            await self._reading
            return None
        message = await self._context.read()
        return message if isinstance(message, external_processor_pb2.ProcessingRequest) else None

    async def take(self, message: Any) -> HttpRequest | None:
        """Takes a message; see `PickerSession.take`."""
        answers, request = self.session.take(message)
        for answer in answers:
            await self._write(answer)
        return request

    async def route(self, route: Route) -> None:
        """Sends a route."""
        self._is_routed = True
        for message in self.session.routed(route):
            await self._write(message)

    async def answer(self, answer: DirectAnswer) -> None:
        """Sends an answer for the caller."""
        self._is_routed = True
        await self._write(self.session.answered(answer))

    async def _write(self, message: external_processor_pb2.ProcessingResponse) -> None:
        if self._writing is None:
            await self._context.write(message)
            return
        # The proxy may answer the last chunk of a request before its write has returned, and be read beside it.
        async with self._writing:
            await self._context.write(message)

    def watch(self) -> None:
        """Reads on while the request waits; cancels the current task where the stream ends meanwhile."""
        waiting = asyncio.current_task()
        assert waiting is not None, "a servicer runs in a task"
        self._writing = asyncio.Lock()
        self._reading = asyncio.create_task(self._read_on(waiting), name="picker-stream")

    async def _read_on(self, waiting: asyncio.Task[Any]) -> None:
        while isinstance(message := await self._context.read(), external_processor_pb2.ProcessingRequest):
            with suppress(WeftError):
                await self.take(message)
        if not self._is_routed:
            self.is_gone = True
            waiting.cancel()

    async def close(self) -> None:
        """End the reading."""
        if self._reading is not None:
            await stop_tasks([self._reading])


class AccessLog:
    """Serves /envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs."""

    def __init__(self, lane: LaneRequests) -> None:
        self._lane = lane

    async def stream(self, _messages: object, context: Context) -> access_log_pb2.StreamAccessLogsResponse:
        """Serves one stream, which lasts as long as its proxy."""
        try:
            await self._read(context)
        finally:
            self.note_proxy_gone(context.peer())
        return access_log_pb2.StreamAccessLogsResponse()

    def note_proxy_gone(self, connection: str) -> None:
        """See `LaneRequests.note_proxy_gone`."""
        self._lane.note_proxy_gone(connection)

    async def _read(self, context: Context) -> None:
        while isinstance(message := await context.read(), access_log_pb2.StreamAccessLogsMessage):
            for entry in message.http_logs.log_entry:
                try:
                    self._lane.note_sight(sight_of(entry))
                except Exception:
                    # One entry must not cost the stream, and with it the ends of all other requests.
                    log.exception("entry of the proxy's log failed", request_id=entry.request.request_id)


def add_to_server(processor: ExternalProcessor, access_log: AccessLog | None, server: grpc.aio.Server) -> None:
    """Adds the services to a server."""
    pb, logs = external_processor_pb2, access_log_pb2
    process = grpc.stream_stream_rpc_method_handler(
        processor.process,
        request_deserializer=pb.ProcessingRequest.FromString,
        response_serializer=pb.ProcessingResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXTERNAL_PROCESSOR, {"Process": process}),))
    if access_log is None:
        return
    stream = grpc.stream_unary_rpc_method_handler(
        access_log.stream,
        request_deserializer=logs.StreamAccessLogsMessage.FromString,
        response_serializer=logs.StreamAccessLogsResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(ACCESS_LOG_SERVICE, {"StreamAccessLogs": stream}),)
    )
    if isinstance(server, LocalServer):
        # A proxy opens the stream of its log with the first entry: one that is killed before has a connection alone.
        server.watch_connections(access_log.note_proxy_gone)
