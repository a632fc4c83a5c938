"""Messages of the external processing protocol, as a gateway writes and reads them."""

import ipaddress
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from weft.api.envoy.v1.base_pb2 import HeaderMap, HeaderValueOption, Metadata
from weft.api.envoy.v1.external_processor_pb2 import (
    HeaderMutation,
    HttpBody,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from weft.kernel.lane_names import DESTINATION, DESTINATION_NAMESPACE, DESTINATION_SERVED, SUBSET, SUBSET_NAMESPACE
from weft_testing.conformance.findings import BrokenPromiseError, require
from weft_testing.conformance.picker_gateways import FULL_DUPLEX, GatewayProfile

ATTRIBUTES = "envoy.filters.http.ext_proc"
MAX_PORT = 65_535
OVERWRITES = frozenset(
    {
        HeaderValueOption.HEADER_APPEND_ACTION_OVERWRITE_IF_EXISTS_OR_ADD,
        HeaderValueOption.HEADER_APPEND_ACTION_OVERWRITE_IF_EXISTS,
    }
)

Headers = tuple[tuple[str, str], ...]


class HeaderForm(Enum):
    """The field of a header in which its value is; gateways differ."""

    RAW = "raw_value"
    TEXT = "value"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A request of a caller."""

    method: str = "POST"
    path: str = "/v1/chat/completions"
    headers: Headers = ()
    chunks: tuple[bytes, ...] = ()
    """The body as it arrives; empty: there is none, and the headers end the request."""
    trailers: Headers = ()
    subset: Sequence[str] | str | None = None
    """Endpoints to choose from, as the gateway names them; a text is sent as one."""
    header_form: HeaderForm = HeaderForm.RAW

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """A response of an endpoint."""

    status: int = 200
    headers: Headers = (("content-type", "text/event-stream"),)
    chunks: tuple[bytes, ...] = (b'data: {"choices":[]}\n\n', b"data: [DONE]\n\n")
    trailers: Headers = ()
    served: str | None = None
    """The endpoint, where the gateway names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A response that a picker makes itself, so that no endpoint is asked."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def words(self) -> str:
        """The status, and the beginning of the body."""
        return f"{self.status} {self.body[:200].decode(errors='replace')}".strip()


def header_map(headers: Iterable[tuple[str, str]], form: HeaderForm = HeaderForm.RAW) -> HeaderMap:
    """Returns headers as a message."""
    found = HeaderMap()
    for key, value in headers:
        entry = found.headers.add(key=key)
        if form is not HeaderForm.TEXT:
            entry.raw_value = value.encode()
        if form is not HeaderForm.RAW:
            entry.value = value
    return found


def request_messages(request: HttpRequest, profile: GatewayProfile) -> list[ProcessingRequest]:
    """Returns all messages of a request, in order."""
    first = ProcessingRequest()
    pseudo = ((":method", request.method), (":path", request.path), (":scheme", "http"), (":authority", "localhost"))
    headers = header_map((*pseudo, *request.headers, *profile.headers), request.header_form)
    first.request_headers.headers.CopyFrom(headers)
    first.request_headers.end_of_stream = not request.chunks and not request.trailers
    if profile.sends_protocol_config:
        first.protocol_config.CopyFrom(
            ProtocolConfiguration(request_body_mode=FULL_DUPLEX, response_body_mode=profile.response_body_mode)
        )
    for key, value in profile.attributes:
        first.attributes[ATTRIBUTES].fields[key].string_value = value
    if profile.forwards_metadata or request.subset is not None:
        first.metadata_context.CopyFrom(_subset(request.subset))
    body = _body(request.chunks, has_trailers=bool(request.trailers), profile=profile)
    messages = [first, *(ProcessingRequest(request_body=chunk) for chunk in body)]
    if request.trailers:
        last = ProcessingRequest()
        last.request_trailers.trailers.CopyFrom(header_map(request.trailers))
        messages.append(last)
    return messages


def response_messages(response: HttpResponse, profile: GatewayProfile) -> list[ProcessingRequest]:
    """Returns all messages of a response, in order."""
    first = ProcessingRequest()
    headers = header_map(((":status", str(response.status)), *response.headers))
    first.response_headers.headers.CopyFrom(headers)
    first.response_headers.end_of_stream = not response.chunks and not response.trailers
    if response.served is not None:
        served = first.metadata_context.filter_metadata[DESTINATION_NAMESPACE]
        served.fields[DESTINATION_SERVED].string_value = response.served
    body = _body(response.chunks, has_trailers=bool(response.trailers), profile=profile)
    messages = [first, *(ProcessingRequest(response_body=chunk) for chunk in body)]
    if response.trailers:
        last = ProcessingRequest()
        last.response_trailers.trailers.CopyFrom(header_map(response.trailers))
        messages.append(last)
    return messages


def _subset(subset: Sequence[str] | str | None) -> Metadata:
    metadata = Metadata()
    if subset is not None:
        value = metadata.filter_metadata[SUBSET_NAMESPACE].fields[SUBSET]
        if isinstance(subset, str):
            value.string_value = subset
        else:
            value.list_value.extend(subset)
    return metadata


def _body(chunks: Sequence[bytes], *, has_trailers: bool, profile: GatewayProfile) -> list[HttpBody]:
    """Returns the messages of a body; with trailers, none of them ends it."""
    size = profile.chunk_bytes
    pieces = [chunk[at : at + size] for chunk in chunks for at in range(0, max(1, len(chunk)), size)]
    messages = [HttpBody(body=piece) for piece in pieces]
    if messages and not has_trailers:
        if profile.ends_with_empty_chunk:
            messages.append(HttpBody())
        messages[-1].end_of_stream = True
    return messages


def set_headers(mutation: HeaderMutation) -> dict[str, str]:
    """Returns the headers that a mutation sets; the last of a name counts."""
    found = {}
    for option in mutation.set_headers:
        header = option.header
        require(not (header.value and header.raw_value), f"the header {header.key} has both a value and a raw value")
        found[header.key.lower()] = header.raw_value.decode(errors="replace") or header.value
    return found


def refusal_of(immediate: ImmediateResponse) -> Refusal:
    """Reads a response that a picker made itself."""
    return Refusal(status=immediate.status.code, headers=set_headers(immediate.headers), body=immediate.body)


def destination_metadata(answer: ProcessingResponse) -> str:
    """Returns the destination in the metadata of an answer; empty where there is none."""
    fields = answer.dynamic_metadata.fields
    if DESTINATION_NAMESPACE not in fields:
        return ""
    inner = fields[DESTINATION_NAMESPACE].struct_value.fields
    return inner[DESTINATION].string_value if DESTINATION in inner else ""


def endpoints_of(value: str) -> tuple[str, ...]:
    """Returns the endpoints of a destination. Raises BrokenPromiseError unless each is `ip:port`."""
    endpoints = tuple(value.split(","))
    for endpoint in endpoints:
        host, _, port = endpoint.strip().rpartition(":")
        try:
            ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
            good = 0 < int(port) <= MAX_PORT
        except ValueError:
            good = False
        if not good:
            raise BrokenPromiseError(f"the destination is no ip:port: {value!r}")
    return tuple(endpoint.strip() for endpoint in endpoints)


def json_of(body: bytes) -> Any:
    """Returns the JSON document of a body; None where it is none."""
    try:
        return json.loads(body)
    except ValueError:
        return None
