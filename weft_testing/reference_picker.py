"""A small endpoint picker that keeps the endpoint-picker protocol, for tests of gateways and of the suite of pickers.

It chooses endpoints in turn, keeps no queue and knows no keys. Each step is a method of its own, so that a test can
break one promise and keep the others.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from weft.api.envoy.v1.base_pb2 import HeaderValueOption
from weft.api.envoy.v1.external_processor_pb2 import HeaderMutation, HttpHeaders, ProcessingRequest, ProcessingResponse
from weft.kernel.lane_names import (
    DESTINATION,
    DESTINATION_NAMESPACE,
    DESTINATION_SERVED,
    EXTERNAL_PROCESSOR,
    SUBSET,
    SUBSET_NAMESPACE,
)
from weft_testing.free_port import free_port

CHUNK_BYTES = 62_000
HEALTH_SERVICES = ("liveness", "readiness", EXTERNAL_PROCESSOR, "inference-extension")
TEST_SELECTION = "test-epp-endpoint-selection"
TEST_SERVED = "x-conformance-test-served-endpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSettings:
    """What a reference picker chooses from."""

    endpoints: tuple[str, ...]
    """`ip:port` each."""
    fallbacks: int = 0
    """Endpoints that are named after the first choice."""
    hooks: bool = False
    unready_models: tuple[str, ...] = ()
    max_running: int = 16
    """Requests at once; more are refused with 429."""


class RefusedError(Exception):
    """The picker answers itself."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True, kw_only=True)
class Turn:
    """What is known of one request."""

    headers: dict[str, str]
    allowed: tuple[str, ...] | None = None
    """The subset that the gateway named; None: it named none."""
    body: bytes = b""


class ReferencePicker:
    """The servicer."""

    def __init__(self, settings: ReferenceSettings) -> None:
        self.settings = settings
        self._turn = 0
        self.running = 0
        self._ended = asyncio.Condition()

    async def process(
        self, requests: AsyncIterator[ProcessingRequest], context: Any
    ) -> AsyncIterator[ProcessingResponse]:
        """Serves one stream."""
        turn: Turn | None = None
        is_running = False
        try:
            async for request in requests:
                kind = request.WhichOneof("request")
                if kind == "request_headers":
                    turn = self.read_headers(request)
                elif turn is None:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message has no headers")
                    return
                is_whole = turn is not None and self.take_request(turn, request)
                if is_whole:
                    try:
                        self.admit()
                        is_running = True
                        answers = list(self.answer_request(turn, has_trailers=kind == "request_trailers"))
                    except RefusedError as refused:
                        yield self.refusal(refused)
                        return
                    for answer in answers:
                        yield answer
                    if self.closes_after_request():
                        return
                elif kind is not None and kind.startswith("response"):
                    for answer in self.answer_response(request):
                        yield answer
        finally:
            self.running -= is_running
            async with self._ended:
                self._ended.notify_all()

    async def idle(self) -> None:
        """Returns once no request runs."""
        async with self._ended:
            await self._ended.wait_for(lambda: not self.running)

    def closes_after_request(self) -> bool:
        """Whether the stream ends with the request."""
        return False

    def admit(self) -> None:
        """Counts a request. Raises RefusedError where there are too many."""
        if self.running >= self.settings.max_running:
            raise RefusedError(429, "too many requests")
        self.running += 1

    def read_headers(self, request: ProcessingRequest) -> Turn:
        """Reads headers and metadata."""
        return Turn(headers=texts_of(request.request_headers), allowed=self.read_subset(request))

    def read_subset(self, request: ProcessingRequest) -> tuple[str, ...] | None:
        """Returns the endpoints that the gateway allows."""
        metadata = request.metadata_context.filter_metadata
        if SUBSET_NAMESPACE not in metadata or SUBSET not in metadata[SUBSET_NAMESPACE].fields:
            return None
        value = metadata[SUBSET_NAMESPACE].fields[SUBSET]
        if value.WhichOneof("kind") == "list_value":
            return tuple(each.string_value for each in value.list_value.values)
        return tuple(part.strip() for part in value.string_value.split(",") if part.strip())

    def take_request(self, turn: Turn, request: ProcessingRequest) -> bool:
        """Takes a part of the request. Returns whether it is whole."""
        kind = request.WhichOneof("request")
        if kind == "request_headers":
            return request.request_headers.end_of_stream
        if kind == "request_body":
            turn.body += request.request_body.body
            return request.request_body.end_of_stream
        return kind == "request_trailers"

    def answer_request(self, turn: Turn, *, has_trailers: bool) -> Iterator[ProcessingResponse]:
        """Yields all answers to a whole request. Raises RefusedError."""
        if turn.headers.get(":method") != "GET":
            self.check_body(turn)
        yield self.headers_answer(self.choose(turn))
        if turn.headers.get(":method") != "GET":
            yield from self.body_answers("request_body", turn.body, is_end=not has_trailers)
        if has_trailers:
            yield trailers_answer("request_trailers")

    def check_body(self, turn: Turn) -> None:
        """Raises RefusedError where the body is no request."""
        try:
            document = json.loads(turn.body)
        except ValueError:
            raise RefusedError(400, "the body is no JSON") from None
        if isinstance(document, dict) and document.get("model") in self.settings.unready_models:
            raise RefusedError(503, "no endpoint is ready")

    def choose(self, turn: Turn) -> str:
        """Returns the destination. Raises RefusedError where there is none."""
        eligible = self.eligible(turn)
        if not eligible:
            raise RefusedError(503, "no endpoint is eligible")
        self._turn += 1
        first = self._turn % len(eligible)
        ordered = [*eligible[first:], *eligible[:first]]
        return ",".join(ordered[: 1 + self.settings.fallbacks])

    def eligible(self, turn: Turn) -> list[str]:
        """Returns the endpoints that the request may go to."""
        found = [each for each in self.settings.endpoints if turn.allowed is None or each in turn.allowed]
        if self.settings.hooks and TEST_SELECTION in turn.headers:
            wanted = {each.strip() for each in turn.headers[TEST_SELECTION].split(",")}
            found = [each for each in found if each in wanted or each.rpartition(":")[0] in wanted]
        return found

    def headers_answer(self, destination: str) -> ProcessingResponse:
        """Returns the answer to the headers."""
        answer = ProcessingResponse()
        set_header(answer.request_headers.response.header_mutation, DESTINATION, destination)
        inner = answer.dynamic_metadata.fields[DESTINATION_NAMESPACE].struct_value
        inner.fields[DESTINATION].string_value = destination
        return answer

    def body_answers(self, kind: str, body: bytes, *, is_end: bool) -> Iterator[ProcessingResponse]:
        """Yields a body in chunks."""
        chunks = [body[at : at + CHUNK_BYTES] for at in range(0, max(1, len(body)), CHUNK_BYTES)]
        for number, chunk in enumerate(chunks, 1):
            yield body_answer(kind, chunk, is_end=is_end and number == len(chunks))

    def answer_response(self, request: ProcessingRequest) -> Iterator[ProcessingResponse]:
        """Yields the answers to a part of a response."""
        kind = request.WhichOneof("request")
        if kind == "response_headers":
            answer = ProcessingResponse()
            answer.response_headers.SetInParent()
            if self.settings.hooks:
                set_header(answer.response_headers.response.header_mutation, TEST_SERVED, served_of(request))
            yield answer
        elif kind == "response_body":
            part = request.response_body
            yield from self.body_answers("response_body", part.body, is_end=part.end_of_stream)
        else:
            yield trailers_answer("response_trailers")

    def refusal(self, refused: RefusedError) -> ProcessingResponse:
        """Returns the response of the picker itself."""
        answer = ProcessingResponse()
        immediate = answer.immediate_response
        immediate.status.code = refused.status
        set_header(immediate.headers, "content-type", "application/json")
        immediate.body = json.dumps({"error": {"message": str(refused), "code": refused.status}}).encode()
        return answer


def texts_of(headers: HttpHeaders) -> dict[str, str]:
    """Returns headers by their names in lower case."""
    return {each.key.lower(): each.raw_value.decode() or each.value for each in headers.headers.headers}


def set_header(mutation: HeaderMutation, key: str, value: str) -> None:
    """Adds a header that takes the place of all others of its name."""
    option = mutation.set_headers.add(append_action=HeaderValueOption.HEADER_APPEND_ACTION_OVERWRITE_IF_EXISTS_OR_ADD)
    option.header.key, option.header.raw_value = key, value.encode()


def served_of(request: ProcessingRequest) -> str:
    """Returns the endpoint that served, as the gateway names it, in the words of the reference conformance tests."""
    metadata = request.metadata_context.filter_metadata
    if DESTINATION_NAMESPACE not in metadata:
        return "fail: missing envoy lb metadata"
    fields = metadata[DESTINATION_NAMESPACE].fields
    if DESTINATION_SERVED not in fields:
        return "fail: missing destination endpoint served metadata"
    return fields[DESTINATION_SERVED].string_value


def body_answer(kind: str, chunk: bytes, *, is_end: bool) -> ProcessingResponse:
    """Returns one chunk of a body."""
    answer = ProcessingResponse()
    streamed = getattr(answer, kind).response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = chunk, is_end
    streamed.SetInParent()
    return answer


def trailers_answer(kind: str) -> ProcessingResponse:
    """Returns the answer to trailers."""
    answer = ProcessingResponse()
    getattr(answer, kind).SetInParent()
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningPicker:
    """A picker that serves."""

    picker: ReferencePicker
    port: int
    health_port: int


Make = Callable[[ReferenceSettings], ReferencePicker]


@asynccontextmanager
async def running_picker(
    settings: ReferenceSettings,
    make: Make = ReferencePicker,
    *,
    tls: tuple[Path, Path] | None = None,
    healthy: tuple[str, ...] = HEALTH_SERVICES,
) -> AsyncIterator[RunningPicker]:
    """Yields a picker on ports of its own; `tls` is files of a certificate chain and its key."""
    picker, port, health_port = make(settings), free_port(), free_port()
    server, health_server = grpc.aio.server(), grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(
        picker.process,
        request_deserializer=ProcessingRequest.FromString,
        response_serializer=ProcessingResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXTERNAL_PROCESSOR, {"Process": handler}),))
    statuses = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(statuses, health_server)
    for service in healthy:
        await statuses.set(service, health_pb2.HealthCheckResponse.SERVING)
    if tls is None:
        server.add_insecure_port(f"127.0.0.1:{port}")
    else:
        chain, key = await asyncio.gather(*(asyncio.to_thread(path.read_bytes) for path in tls))
        server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([(key, chain)]))
    health_server.add_insecure_port(f"127.0.0.1:{health_port}")
    await asyncio.gather(server.start(), health_server.start())
    try:
        yield RunningPicker(picker=picker, port=port, health_port=health_port)
    finally:
        await asyncio.gather(server.stop(None), health_server.stop(None))
