"""One stream of an external processor as a state machine: messages of the proxy in, answers out. Pure.

A stream belongs to one HTTP request, in these states:

    HEAD      nothing has arrived
    BODY      the headers are known; the body arrives
    PICKING   all of the request is known; an endpoint is chosen for it
    ANSWERED  the proxy has its answer; what it still sends of the request is ignored, the response is passed on

In full duplex the answer to the headers may wait for the body, and the body is then sent again in chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from google.protobuf.struct_pb2 import Struct

from weft.api.envoy.v1 import base_pb2
from weft.api.envoy.v1 import external_processor_pb2 as pb
from weft.kernel.errors import WeftError
from weft.kernel.lane_names import (
    ANSWER_NAMESPACE,
    DESTINATION,
    DESTINATION_NAMESPACE,
    DESTINATION_SERVED,
    REASON_HEADER,
)
from weft.kernel.reasons import Reason
from weft.kernel.value import value_class

MAX_CHUNK_BYTES = 62_000
"""Bytes of a body in one message: the protocol demands fewer than 64 KiB."""
Headers = Sequence[tuple[bytes, bytes]]

_OVERWRITE = base_pb2.HeaderValueOption.HEADER_APPEND_ACTION_OVERWRITE_IF_EXISTS_OR_ADD
_FULL_DUPLEX = pb.BODY_SEND_MODE_FULL_DUPLEX_STREAMED
_NO_BODY = pb.BODY_SEND_MODE_UNSPECIFIED
_LAST_EVENT, _TAIL_BYTES = b"[DONE]", 32
TEST_SERVED = "x-conformance-test-served-endpoint"
"""Header of a response in the conformance tests of gateways: the endpoint that the gateway names as serving."""


@value_class(kw_only=True)
class HttpRequest:
    """A whole request, as the proxy sent it."""

    headers: Headers
    """Names in lower case, pseudo headers included."""
    chunks: Sequence[bytes]
    """Its body, in the chunks in which it arrived."""
    metadata: base_pb2.Metadata
    """What the proxy knows of it beside its headers."""

    @property
    def body(self) -> bytes:
        """The whole body."""
        return self.chunks[0] if len(self.chunks) == 1 else b"".join(self.chunks)


@value_class(kw_only=True)
class Route:
    """Where the proxy sends a request, and what it changes in it."""

    destinations: tuple[str, ...]
    """Endpoints `ip:port`, the preferred one first."""
    set_headers: tuple[tuple[str, str], ...] = ()
    remove_headers: tuple[str, ...] = ()
    body: bytes | None = None
    """The body in place of the one that arrived; None: that one."""
    answer_headers: tuple[tuple[str, str], ...] = ()
    """Headers that the answer has besides, whoever sends it."""
    facts: tuple[tuple[str, str, str], ...] = ()
    """Further dynamic metadata, which the access log repeats: namespace, name and value."""


@value_class(kw_only=True)
class DirectAnswer:
    """What the proxy answers the caller itself."""

    status: int
    headers: Headers
    body: bytes
    details: str
    """A word for the access log."""


@dataclass(slots=True)
class PassedResponse:
    """What the session saw of the response that passed it."""

    status: int = 0
    """0: none has come."""
    reason: str = ""
    """The header with the reason of an error; empty: none."""
    served: str = ""
    """The endpoint that the gateway names as the one that served; empty: it names none."""
    byte_count: int = 0
    is_stream: bool = False
    """Whether it is server-sent events, whose last one says that the answer is complete."""
    tail: bytes = b""
    """Its last bytes."""
    has_ended: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether it has ended, and an event stream with its last event."""
        return self.has_ended and (not self.is_stream or _LAST_EVENT in self.tail)

    def take(self, chunk: pb.HttpBody) -> None:
        """Note a chunk."""
        self.byte_count += len(chunk.body)
        self.tail = (self.tail + chunk.body[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        self.has_ended |= chunk.end_of_stream


class State(Enum):
    """See the module's docstring."""

    HEAD = "head"
    BODY = "body"
    PICKING = "picking"
    ANSWERED = "answered"


class PickerSession:
    """The state of one stream."""

    def __init__(self, max_body_bytes: int) -> None:
        self.state = State.HEAD
        self._max_body_bytes = max_body_bytes
        self._headers: Headers = ()
        self._metadata = base_pb2.Metadata()
        self._chunks: list[bytes] = []
        self.body_bytes = 0
        """Size of the body, as far as it has come."""
        self._has_body = False
        self._has_trailers = False
        self.passed = PassedResponse()
        self._answer_headers: tuple[tuple[str, str], ...] = ()
        self.promises_response = False
        """Whether the gateway has said that the response comes here, too."""
        self.shows_responses = False
        """Whether it may be so: it has promised it, or said nothing."""
        self.tells_served = False
        """Whether the caller is told which endpoint served, for conformance tests of gateways."""

    @property
    def headers(self) -> Headers:
        """Headers of the request; empty before they have arrived."""
        return self._headers

    def take(self, message: pb.ProcessingRequest) -> tuple[list[pb.ProcessingResponse], HttpRequest | None]:
        """Takes a message; returns the answers that it has at once, and the request once all of it has arrived.

        Raises MALFORMED_REQUEST for a message that the protocol does not allow, or a mode that is not supported,
        REQUEST_TOO_LARGE for a body above the limit.
        """
        kind = message.WhichOneof("request")
        match kind:
            case "request_headers":
                return [], self._take_headers(message)
            case "request_body":
                return [], self._take_body(message.request_body)
            case "request_trailers":
                return [], self._take_trailers()
            case "response_headers":
                return [self._take_response_headers(message)], None
            case "response_body":
                self.passed.take(message.response_body)
                return [_chunk_of_response(message.response_body)], None
            case "response_trailers":
                self.passed.has_ended = True
                return [pb.ProcessingResponse(response_trailers=pb.TrailersResponse())], None
        raise WeftError(Reason.MALFORMED_REQUEST, "a message of the proxy has no part of a request or a response")

    def routed(self, route: Route) -> Sequence[pb.ProcessingResponse]:
        """Returns the answers that send the request to its endpoints: changed headers, the body again, trailers."""
        self.state = State.ANSWERED
        self._answer_headers = route.answer_headers
        answers = [_routed_headers(route, names_answer_headers=not self.promises_response)]
        if self._has_body:
            chunks = self._chunks if route.body is None else (route.body,)
            answers += _body_again(chunks, ends=not self._has_trailers)
        if self._has_trailers:
            answers.append(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))
        self._chunks = []
        return answers

    def answered(self, answer: DirectAnswer) -> pb.ProcessingResponse:
        """Returns the message with which the proxy answers the caller itself."""
        self.state = State.ANSWERED
        self._chunks = []
        immediate = pb.ImmediateResponse(
            status=pb.HttpStatus(code=answer.status), body=answer.body, details=answer.details
        )
        for name, value in answer.headers:
            _set(immediate.headers, name.decode("latin-1"), value)
        return pb.ProcessingResponse(immediate_response=immediate)

    def _take_headers(self, message: pb.ProcessingRequest) -> HttpRequest | None:
        if self.state is not State.HEAD:
            raise WeftError(Reason.MALFORMED_REQUEST, "the headers of a request have come twice")
        _require_supported(message)
        found = message.request_headers
        self._headers = [
            (each.key.lower().encode("latin-1", "replace"), each.raw_value or each.value.encode())
            for each in found.headers.headers
        ]
        self._metadata = message.metadata_context
        config = message.protocol_config
        self.promises_response = message.HasField("protocol_config") and config.response_body_mode != _NO_BODY
        # One that says nothing of its modes is no proxy that weft has configured.
        self.shows_responses = self.promises_response or not message.HasField("protocol_config")
        if found.end_of_stream:
            return self._complete()
        self.state, self._has_body = State.BODY, True
        return None

    def _take_response_headers(self, message: pb.ProcessingRequest) -> pb.ProcessingResponse:
        passed, answer = self.passed, pb.ProcessingResponse(response_headers=pb.HeadersResponse())
        for each in message.response_headers.headers.headers:
            text = (each.raw_value or each.value.encode()).decode("latin-1")
            key = each.key.lower()
            if key == ":status" and text.isdigit():
                passed.status = int(text)
            elif key == REASON_HEADER:
                passed.reason = text
            elif key == "content-type":
                passed.is_stream = text.startswith("text/event-stream")
        known = message.metadata_context.filter_metadata
        if DESTINATION_NAMESPACE in known:
            passed.served = metadata_text(known[DESTINATION_NAMESPACE], DESTINATION_SERVED)
        passed.has_ended = message.response_headers.end_of_stream
        for name, value in self._answer_headers:
            _set(answer.response_headers.response.header_mutation, name, value.encode("latin-1", "replace"))
        if self.tells_served:
            lacks = "envoy lb" if DESTINATION_NAMESPACE not in known else "destination endpoint served"
            told = passed.served or f"fail: missing {lacks} metadata"
            _set(answer.response_headers.response.header_mutation, TEST_SERVED, told.encode("latin-1", "replace"))
        return answer

    def _take_body(self, chunk: pb.HttpBody) -> HttpRequest | None:
        if self.state is State.HEAD:
            raise WeftError(Reason.MALFORMED_REQUEST, "the body of a request has come before its headers")
        if self.state is not State.BODY:
            # Proxies have sent a body's end twice.
            return None
        self.body_bytes += len(chunk.body)
        if self.body_bytes > self._max_body_bytes:
            raise WeftError(Reason.REQUEST_TOO_LARGE, f"the body is larger than {self._max_body_bytes} bytes")
        if chunk.body:
            self._chunks.append(chunk.body)
        return self._complete() if chunk.end_of_stream else None

    def _take_trailers(self) -> HttpRequest | None:
        if self.state is not State.BODY:
            return None
        self._has_trailers = True
        return self._complete()

    def _complete(self) -> HttpRequest:
        self.state = State.PICKING
        return HttpRequest(headers=self._headers, chunks=self._chunks, metadata=self._metadata)


def _require_supported(message: pb.ProcessingRequest) -> None:
    if message.observability_mode:
        raise WeftError(Reason.MALFORMED_REQUEST, "an external processor that only observes cannot choose an endpoint")
    has_mode = message.HasField("protocol_config") and not message.request_headers.end_of_stream
    if has_mode and message.protocol_config.request_body_mode != _FULL_DUPLEX:
        words = "set request_body_mode: FULL_DUPLEX_STREAMED in the proxy's ext_proc filter: the body names the model"
        raise WeftError(Reason.MALFORMED_REQUEST, words)


def _routed_headers(route: Route, *, names_answer_headers: bool) -> pb.ProcessingResponse:
    """Returns the changed headers; `names_answer_headers`: those of the answer are left to the proxy, as metadata."""
    listed = ",".join(route.destinations)
    answer = pb.ProcessingResponse()
    mutation = answer.request_headers.response.header_mutation
    add_header = mutation.set_headers.add
    for name, value in ((DESTINATION, listed), *route.set_headers):
        header = add_header(append_action=_OVERWRITE).header
        header.key, header.raw_value = name, value.encode("latin-1", "replace")
    mutation.remove_headers.extend(route.remove_headers)
    fields = answer.dynamic_metadata.fields
    fields[DESTINATION_NAMESPACE].struct_value.fields[DESTINATION].string_value = listed
    for namespace, name, text in route.facts:
        fields[namespace].struct_value.fields[name].string_value = text
    if names_answer_headers:
        for name, value in route.answer_headers:
            fields[ANSWER_NAMESPACE].struct_value.fields[name].string_value = value
    return answer


def _set(mutation: pb.HeaderMutation, name: str, value: bytes) -> None:
    header = mutation.set_headers.add(append_action=_OVERWRITE).header
    header.key = name
    header.raw_value = value


def _body_again(chunks: Sequence[bytes], *, ends: bool) -> Sequence[pb.ProcessingResponse]:
    most = MAX_CHUNK_BYTES
    pieces = [chunk[start : start + most] for chunk in chunks for start in range(0, len(chunk), most)]
    if not pieces and ends:
        pieces = [b""]
    last = len(pieces) - 1
    return [_body_message(piece, ends=ends and index == last) for index, piece in enumerate(pieces)]


def _body_message(piece: bytes, *, ends: bool) -> pb.ProcessingResponse:
    answer = pb.ProcessingResponse()
    streamed = answer.request_body.response.body_mutation.streamed_response
    streamed.body = piece
    streamed.end_of_stream = ends
    return answer


def _chunk_of_response(chunk: pb.HttpBody) -> pb.ProcessingResponse:
    """Returns a chunk of a response as it came: the picker changes none, and a proxy in full duplex waits for it."""
    answer = pb.ProcessingResponse()
    streamed = answer.response_body.response.body_mutation.streamed_response
    streamed.body = chunk.body
    streamed.end_of_stream = chunk.end_of_stream
    return answer


def metadata_text(metadata: Struct, key: str) -> str:
    """Returns a text in a proxy's metadata; empty: there is none."""
    return metadata.fields[key].string_value if key in metadata.fields else ""
