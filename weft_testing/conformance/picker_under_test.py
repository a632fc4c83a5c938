"""The endpoint picker under test: its connection, and one stream for each request, as a gateway has them."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weft.api.envoy.v1 import access_log_pb2
from weft.api.envoy.v1.external_processor_pb2 import HeaderMutation, ProcessingRequest, ProcessingResponse
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.lane_names import (
    DESTINATION,
    PICKER_HEALTH_PORT,
    PROCESS_METHOD,
    REQUEST_ID_HEADER,
    STREAM_ACCESS_LOGS_METHOD,
)
from weft.kernel.reasons import Reason
from weft_testing.conformance.findings import BrokenPromiseError, require
from weft_testing.conformance.picker_gateways import MAX_CHUNK_BYTES, GatewayProfile
from weft_testing.conformance.picker_messages import (
    Headers,
    HttpRequest,
    HttpResponse,
    Refusal,
    destination_metadata,
    endpoints_of,
    refusal_of,
    request_messages,
    response_messages,
    set_headers,
)

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 30.0
"""The longest wait for one message of a picker. A cold model may take this long."""
SILENCE_SECONDS = 0.2
"""For this long nothing may come where nothing is due."""
MAX_MESSAGE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerOptions:
    """What the picker is asked for, and how it was started."""

    model: str
    headers: Headers = ()
    """Headers of every request, for instance a key."""
    hooks: bool = False
    """It was started with the hooks of the conformance tests of gateways."""
    unready_model: str | None = None
    """A model without a ready endpoint."""
    max_filling: int = 64
    """The most requests that are held at once to see one refused; 0: none."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a picker answered to a request: a destination and the body, or a refusal."""

    refusal: Refusal | None = None
    headers: dict[str, str] = field(default_factory=dict)
    """Headers that it sets."""
    mutation: HeaderMutation = field(default_factory=HeaderMutation)
    metadata: str = ""
    chunks: list[bytes] = field(default_factory=list)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The endpoints, the first choice first. Raises BrokenPromiseError where it was refused or they are wrong."""
        if self.refusal is not None:
            raise BrokenPromiseError(f"it refused the request: {self.refusal.words}")
        value = self.headers.get(DESTINATION, "")
        require(value != "", f"it set no header {DESTINATION}")
        return endpoints_of(value)

    @property
    def refused(self) -> Refusal:
        """The refusal. Raises BrokenPromiseError where there is none."""
        if self.refusal is None:
            raise BrokenPromiseError(f"it did not refuse the request, but sent it to {self.headers.get(DESTINATION)}")
        return self.refusal

    @property
    def body(self) -> bytes:
        """The body for the endpoint."""
        return b"".join(self.chunks)


class StreamFailedError(BrokenPromiseError):
    """The picker ended a stream with an error."""


class Exchange:
    """One stream: one request of a caller, and its response."""

    def __init__(self, call: Any, profile: GatewayProfile) -> None:
        self._call = call
        self.profile = profile
        self.answer: Answer | None = None
        """The answer to its request, once it is whole."""
        self._arrived: asyncio.Queue[ProcessingResponse | BrokenPromiseError | None] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        end: StreamFailedError | None = None
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._arrived.put_nowait(message)
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                end = StreamFailedError(f"it ended the stream with {code.name}: {await self._call.details()}")
        except grpc.aio.AioRpcError as error:
            end = StreamFailedError(f"it ended the stream with {error.code().name}: {error.details()}")
        finally:
            self._arrived.put_nowait(end)

    async def send(self, *messages: ProcessingRequest) -> None:
        """Sends messages; what the picker has ended takes none, and its end is found by the next read."""
        for message in messages:
            try:
                await self._call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return

    async def next(self, what: str, seconds: float | None = None) -> ProcessingResponse:
        """Returns the next message. Raises BrokenPromiseError where the stream ends or nothing comes."""
        message = await self.next_or_end(what, seconds)
        if message is None:
            raise BrokenPromiseError(f"it closed the stream instead of {what}")
        return message

    async def next_or_end(self, what: str, seconds: float | None = None) -> ProcessingResponse | None:
        """Returns the next message, or None at the picker's end of the stream. By default it waits ANSWER_SECONDS."""
        limit = ANSWER_SECONDS if seconds is None else seconds
        try:
            message = await asyncio.wait_for(self._arrived.get(), limit)
        except TimeoutError:
            raise BrokenPromiseError(f"nothing came within {limit:g} s instead of {what}") from None
        if isinstance(message, BrokenPromiseError):
            raise message
        return message

    async def require_silence(self, otherwise: str, seconds: float = SILENCE_SECONDS) -> None:
        """Raises BrokenPromiseError where a message or the end of the stream comes."""
        try:
            message = await asyncio.wait_for(self._arrived.get(), seconds)
        except TimeoutError:
            return
        if isinstance(message, BrokenPromiseError):
            raise message
        ending = "the end of the stream" if message is None else message.WhichOneof("response")
        raise BrokenPromiseError(f"{otherwise}: {ending}")

    async def close(self) -> None:
        """The gateway has what it needs; requires that the picker ends the stream without another word."""
        await self._call.done_writing()
        message = await self.next_or_end("the end of the stream")
        require(message is None, "a message came after the end of the request")
        await self._reader

    async def leave(self) -> None:
        """Ends the stream as a gateway whose caller has gone, wherever it is."""
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


class PickerUnderTest:
    """A picker, asked as one gateway asks it."""

    def __init__(
        self, channel: grpc.aio.Channel, health: grpc.aio.Channel, profile: GatewayProfile, options: PickerOptions
    ) -> None:
        self.profile = profile
        self.options = options
        self.certificate: bytes | None = None
        """The one that it showed, as DER; None: there is no TLS."""
        self._health: Any = health_pb2_grpc.HealthStub(health)
        self._log: Any = channel.stream_unary(
            STREAM_ACCESS_LOGS_METHOD,
            request_serializer=access_log_pb2.StreamAccessLogsMessage.SerializeToString,
            response_deserializer=access_log_pb2.StreamAccessLogsResponse.FromString,
        )
        self._process: Any = channel.stream_stream(
            PROCESS_METHOD,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )

    @asynccontextmanager
    async def exchange(self) -> AsyncIterator[Exchange]:
        """Yields a new stream, which is cancelled where it has not ended by itself."""
        exchange = Exchange(self._process(), self.profile)
        try:
            yield exchange
        finally:
            await exchange.leave()
            if self.profile.writes_log and exchange.answer is not None:
                await self._log_end(exchange.answer)

    async def ask(self, request: HttpRequest, response: HttpResponse | None = None) -> Answer:
        """Returns the answer to a request, after a whole exchange: a routed one gets a response, too."""
        async with self.exchange() as exchange:
            await exchange.send(*request_messages(request, self.profile))
            answer = await read_answer(exchange, request)
            if answer.refusal is None and self.profile.sees_responses:
                await echoed(exchange, response or HttpResponse(served=self.served_of(answer)))
            await exchange.close()
            return answer

    def served_of(self, answer: Answer) -> str | None:
        """Returns the endpoint that the gateway names as the one that served."""
        return answer.endpoints[0] if self.profile.reports_served else None

    async def _log_end(self, answer: Answer) -> None:
        """Writes the end of a routed request into the access log, as Envoy does; not every picker takes one."""
        if answer.refusal is not None or REQUEST_ID_HEADER not in answer.headers:
            return
        message = access_log_pb2.StreamAccessLogsMessage()
        entry = message.http_logs.log_entry.add()
        entry.request.request_id = answer.headers[REQUEST_ID_HEADER]
        entry.response.response_code.value = 200
        entry.common_properties.upstream_request_attempt_count = 1
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            call = self._log()
            await call.write(message)
            await call.done_writing()
            await call

    async def health(self, service: str) -> int:
        """Returns the status of a service. Raises BrokenPromiseError where it is not known or not answered."""
        try:
            found = await self._health.Check(health_pb2.HealthCheckRequest(service=service), timeout=CONNECT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise BrokenPromiseError(f"health of {service!r}: {error.code().name}: {error.details()}") from None
        return int(found.status)


async def read_answer(exchange: Exchange, request: HttpRequest) -> Answer:
    """Reads the answer to a whole request. Raises BrokenPromiseError where a gateway could not use it."""
    answer = Answer()
    first = await exchange.next("an answer to the headers")
    kind = first.WhichOneof("response")
    if kind == "immediate_response":
        answer.refusal = refusal_of(first.immediate_response)
        return answer
    require(kind == "request_headers", f"its first answer is {kind}, not request_headers")
    common = first.request_headers.response
    answer.mutation = common.header_mutation
    answer.headers = set_headers(common.header_mutation)
    answer.metadata = destination_metadata(first)
    require(not common.HasField("body_mutation"), "its answer to the headers changes the body")
    exchange.answer = answer
    if request.chunks or request.trailers:
        answer.chunks = await read_body(exchange, "request", has_trailers=bool(request.trailers))
    return answer


async def read_body(exchange: Exchange, phase: str, *, has_trailers: bool) -> list[bytes]:
    """Returns the chunks of a body that comes back, and reads the answer to the trailers where it has some."""
    kind, chunks = f"{phase}_body", list[bytes]()
    while True:
        message = await exchange.next(f"a chunk of the {phase}")
        found = message.WhichOneof("response") or "an empty answer"
        if found == f"{phase}_trailers" and has_trailers:
            return chunks
        require(found == kind, f"{found} came where {kind} was due")
        mutation = getattr(message, kind).response.body_mutation
        require(
            mutation.WhichOneof("mutation") == "streamed_response",
            f"{kind} is answered without a streamed response, which ends the request in full duplex",
        )
        chunk = mutation.streamed_response
        require(len(chunk.body) <= MAX_CHUNK_BYTES, f"a chunk of the {phase} has {len(chunk.body)} bytes")
        chunks.append(chunk.body)
        if chunk.end_of_stream:
            require(not has_trailers, f"it ended the body of the {phase}, which its trailers end")
            return chunks


async def echoed(exchange: Exchange, response: HttpResponse) -> dict[str, str]:
    """Sends a response and requires it back unchanged. Returns the headers that the picker sets in it."""
    await exchange.send(*response_messages(response, exchange.profile))
    headers = await read_response_headers(exchange)
    if response.chunks or response.trailers:
        chunks = await read_body(exchange, "response", has_trailers=bool(response.trailers))
        sent, back = b"".join(response.chunks), b"".join(chunks)
        require(back == sent, f"{len(back)} bytes came back that are not the {len(sent)} of the response")
    return headers


async def read_response_headers(exchange: Exchange) -> dict[str, str]:
    """Returns the headers that the picker sets in a response."""
    first = await exchange.next("an answer to the response's headers")
    kind = first.WhichOneof("response")
    require(kind == "response_headers", f"the headers of the response were answered by {kind}")
    return set_headers(first.response_headers.response.header_mutation)


@dataclass(frozen=True, slots=True)
class PickerAddress:
    """Where a picker is."""

    target: str
    """`host:port`."""
    is_secure: bool
    health_target: str

    @classmethod
    def parse(cls, address: str, health: str | None = None) -> "PickerAddress":
        """Reads `host:port`, `http://host:port`, or `https://host:port` for TLS. Raises WeftError."""
        scheme, separator, rest = address.partition("://")
        target = rest if separator else address
        host, colon, port = target.rpartition(":")
        if (separator and scheme not in {"http", "https"}) or not colon or not port.isdigit() or not host:
            raise invalid_field("PICKER", f"{address!r} is no host:port, with https:// before it for TLS")
        return cls(target, scheme == "https" and bool(separator), health or f"{host}:{PICKER_HEALTH_PORT}")


@asynccontextmanager
async def attach_picker(
    address: PickerAddress, profile: GatewayProfile, options: PickerOptions
) -> AsyncIterator[PickerUnderTest]:
    """Yields the picker at an address; its certificate is not verified, as gateways do not. Raises WeftError."""
    certificate = (await _shown(address.target)) if address.is_secure else None
    async with _channel(address.target, certificate) as channel, _channel(address.health_target, None) as health:
        try:
            await asyncio.wait_for(channel.channel_ready(), CONNECT_SECONDS)
        except TimeoutError:
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE, f"nothing speaks gRPC at {address.target} (https:// is for TLS)"
            ) from None
        picker = PickerUnderTest(channel, health, profile, options)
        picker.certificate = certificate
        yield picker


def _channel(target: str, certificate: bytes | None) -> grpc.aio.Channel:
    """Opens a channel to a peer of exactly this certificate; None: without TLS."""
    limits = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.use_local_subchannel_pool", 1)]
    if certificate is None:
        return grpc.aio.insecure_channel(target, options=limits)
    shown = x509.load_der_x509_certificate(certificate)
    roots = grpc.ssl_channel_credentials(root_certificates=shown.public_bytes(Encoding.PEM))
    named = [("grpc.ssl_target_name_override", name) for name in _names(shown)[:1]]
    return grpc.aio.secure_channel(target, roots, options=[*limits, *named])


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


async def _shown(target: str) -> bytes:
    """Returns the certificate at a target. Raises WeftError where gateways could not use its TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = target.rpartition(":")
    try:
        connecting = asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
        _, writer = await asyncio.wait_for(connecting, CONNECT_SECONDS)
    except (OSError, TimeoutError) as error:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, f"no TLS at {target}: {error}") from None
    try:
        layer = writer.get_extra_info("ssl_object")
        shown: bytes = layer.getpeercert(binary_form=True)
        protocol = layer.selected_alpn_protocol()
    finally:
        writer.close()
    if protocol != "h2":
        raise WeftError(Reason.SERVICE_UNAVAILABLE, f"TLS at {target} agrees on no h2, which clients of gRPC demand")
    certificate = x509.load_der_x509_certificate(shown)
    if not certificate.not_valid_before_utc <= datetime.now(UTC) <= certificate.not_valid_after_utc:
        until = f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        raise WeftError(Reason.SERVICE_UNAVAILABLE, f"the certificate at {target} is not valid now, but until {until}")
    return shown
