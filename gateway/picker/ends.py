"""How a request of the lane ended, by its two witnesses: the runner's report and the proxy's access log. Pure.

The runner knows what it generated, the proxy what the caller got. Where both speak, the runner's report is the receipt,
and the proxy's record is beside it with each contradiction. Where only the proxy speaks, an answer that the proxy took
for complete is complete if its usage arrived, cut off if usage was to come and did not, and otherwise unknown, which
counts as lost.
"""

from google.protobuf.struct_pb2 import Struct

from gateway.picker.session import PassedResponse, metadata_text
from weft.api.common.v1 import receipt_pb2, usage_pb2
from weft.api.envoy.v1 import access_log_pb2, token_usage_pb2
from weft.kernel.lane_names import DESTINATION_NAMESPACE, DESTINATION_SERVED, PLACED, REASON_HEADER
from weft.kernel.reasons import Reason
from weft.kernel.timestamps import set_seconds
from weft.kernel.value import value_class

MAX_FLAGS = 8
MAX_DETAIL_CHARS = 256
_GONE = frozenset({"downstream_connection_termination", "downstream_remote_reset", "downstream_protocol_error"})
_LATE = frozenset(
    {
        "upstream_request_timeout",
        "stream_idle_timeout",
        "duration_timeout",
        "upstream_max_stream_duration_reached",
    }
)
_UNREACHED = frozenset({"upstream_connection_failure", "no_healthy_upstream", "no_cluster_found", "no_route_found"})
_BROKEN = frozenset(
    {
        "upstream_remote_reset",
        "upstream_connection_termination",
        "upstream_protocol_error",
        "local_reset",
        "upstream_overflow",
        "overload_manager",
    }
)

_TOKENS = ("prompt_tokens", "completion_tokens")
COMPARED = ("end", *_TOKENS)
"""What runner and proxy may contradict each other about: the beginnings of contradictions."""
_FAILED_STATUS = 400
_SERVER_STATUS = 500


@value_class(kw_only=True)
class ProxySight:
    """What the proxy saw of a request, from its access log."""

    request_id: str
    status: int = 0
    """The status that the caller was sent; 0: none."""
    flags: tuple[str, ...] = ()
    details: str = ""
    reason: Reason = Reason.UNSPECIFIED
    """The reason in the answer's header; UNSPECIFIED: none."""
    endpoint: str = ""
    """The endpoint that was asked last; empty: none."""
    attempt_count: int = 0
    answer_bytes: int = 0
    usage: usage_pb2.Usage | None = None
    """Usage that the answer stated. Read-only."""
    first_byte_seconds: float | None = None
    """From the request's first byte to the answer's, which belongs to its head: no sign of a first token."""
    duration_seconds: float | None = None
    placed: str = ""
    """Model and runner that a picker named; empty: no picker placed it."""
    is_complete: bool | None = None
    """Whether the answer passed the picker to its end; None: it did not pass here, the sight is of the log."""
    goes_on: bool = False
    """Whether the request goes on: the entry is a sign of life."""


def sight_of_stream(request_id: str, passed: PassedResponse) -> ProxySight:
    """Returns what the stream of a request says that has ended, where its response came by."""
    return ProxySight(
        request_id=request_id,
        status=passed.status,
        details="" if passed.status else "the stream to the picker ended before a response",
        reason=_reason_in(passed.reason),
        endpoint=passed.served,
        answer_bytes=passed.byte_count,
        is_complete=passed.is_complete,
    )


def sight_of(entry: access_log_pb2.HTTPAccessLogEntry) -> ProxySight:
    """Returns what an entry says; parts of types that are not known are left out."""
    common, response = entry.common_properties, entry.response
    flags = tuple(field.name for field, _ in common.response_flags.ListFields())
    known = common.metadata.filter_metadata.get(DESTINATION_NAMESPACE, Struct())
    address = common.upstream_remote_address.socket_address
    first = common.time_to_first_upstream_rx_byte if common.HasField("time_to_first_upstream_rx_byte") else None
    return ProxySight(
        request_id=entry.request.request_id,
        status=response.response_code.value,
        flags=flags[:MAX_FLAGS],
        details=response.response_code_details[:MAX_DETAIL_CHARS],
        reason=_reason_in(response.response_headers.get(REASON_HEADER, "")),
        endpoint=metadata_text(known, DESTINATION_SERVED)
        or (f"{address.address}:{address.port_value}" if address.address else ""),
        attempt_count=common.upstream_request_attempt_count,
        answer_bytes=response.response_body_bytes,
        usage=_usage_in(common),
        first_byte_seconds=None if first is None else first.ToNanoseconds() / 1e9,
        duration_seconds=common.duration.ToNanoseconds() / 1e9 if common.HasField("duration") else None,
        placed=metadata_text(known, PLACED),
        goes_on=common.intermediate_log_entry,
    )


def _reason_in(text: str) -> Reason:
    return Reason[text] if text in Reason.__members__ else Reason.UNSPECIFIED


_USAGE_TYPE = "/envoy.data.ai.v3.TokenUsage"


def _usage_in(common: access_log_pb2.AccessLogCommon) -> usage_pb2.Usage | None:
    for packed in common.metadata.typed_filter_metadata.values():
        if packed.type_url.endswith(_USAGE_TYPE):
            found = token_usage_pb2.TokenUsage.FromString(packed.value)
            if found.extraction_status != token_usage_pb2.TokenUsage.EXTRACTION_STATUS_COMPLETE:
                return None
            return usage_pb2.Usage(
                prompt_tokens=found.input_tokens.value,
                completion_tokens=found.output_tokens.value,
                cached_prompt_tokens=found.input_token_details.cached_tokens.value,
                reasoning_tokens=found.output_token_details.reasoning_tokens.value,
            )
    return None


@value_class(kw_only=True)
class SeenEnd:
    """How a request ended as the proxy saw it."""

    reason: Reason
    """UNSPECIFIED: it is complete."""
    is_known: bool = True
    """False: the proxy saw nothing wrong, and nothing shows that the answer was complete."""


def seen_end(sight: ProxySight, *, shows_usage: bool) -> SeenEnd:
    """Returns how a request ended by the proxy's log alone; `shows_usage`: each complete answer states its usage."""
    if sight.is_complete is False:
        # Who ended it, the caller or the endpoint, a gateway does not say on the picker's stream.
        return SeenEnd(reason=Reason.WORKER_LOST, is_known=False)
    fault = _fault_in(sight)
    if fault is not None:
        return SeenEnd(reason=fault)
    if sight.is_complete:
        # All of its bytes: what they say, an error event perhaps, the runner knows.
        return SeenEnd(reason=Reason.UNSPECIFIED, is_known=False)
    if sight.usage is not None:
        return SeenEnd(reason=Reason.UNSPECIFIED)
    # A clean end of the bytes: the missing usage is the only sign of an answer that was cut off.
    return SeenEnd(reason=Reason.WORKER_LOST, is_known=shows_usage)


def _fault_in(sight: ProxySight) -> Reason | None:
    """Returns what went wrong, the first rule that applies; None: nothing that the proxy knows."""
    flags, status = frozenset(sight.flags), sight.status
    faults = (
        (bool(flags & _GONE), Reason.CANCELLED),
        (bool(flags & _LATE), Reason.DEADLINE_EXCEEDED),
        (sight.reason is not Reason.UNSPECIFIED, sight.reason),
        (bool(flags & _UNREACHED) or (status >= _FAILED_STATUS and not sight.endpoint), Reason.CONNECT_FAILED),
        (bool(flags & _BROKEN) or not status, Reason.WORKER_LOST),
        (status >= _SERVER_STATUS, Reason.BACKEND_ERROR),
        (status >= _FAILED_STATUS, Reason.BACKEND_REJECTED),
    )
    return next((reason for applies, reason in faults if applies), None)


def has_begun(sight: ProxySight) -> bool:
    """Whether the caller was sent a part of an answer."""
    return bool(sight.answer_bytes) and 0 < sight.status < _FAILED_STATUS


def is_whole(sight: ProxySight) -> bool:
    """Whether the answer has ended and the proxy saw nothing wrong with it."""
    return sight.is_complete is not False and _fault_in(sight) is None


def was_never_reached(sight: ProxySight) -> bool:
    """Whether no endpoint took the request, so that no runner reports its end."""
    return bool(frozenset(sight.flags) & _UNREACHED) and not has_begun(sight)


def disagreements(receipt: receipt_pb2.Receipt, sight: ProxySight, *, shows_usage: bool) -> list[str]:
    """Returns where the proxy contradicts a receipt that a runner's report made, as text.

    What one of them does not say is no contradiction.
    """
    found = []
    seen = seen_end(sight, shows_usage=shows_usage)
    told = Reason(receipt.reason)
    # A proxy takes the end of a stream that was cancelled by its id for a cut.
    agree = _side(seen.reason) == _side(told) or (bool(receipt.cancelled_by) and seen.reason is not Reason.UNSPECIFIED)
    if seen.is_known and not agree:
        found.append(f"end: the runner reports {_words(told)}, the proxy saw {_words(seen.reason)}")
    if receipt.HasField("usage") and sight.usage is not None:
        for name in _TOKENS:
            mine, its = getattr(receipt.usage, name), getattr(sight.usage, name)
            if mine != its:
                found.append(f"{name}: the runner reports {mine}, the proxy saw {its}")
    return found


def _side(reason: Reason) -> str:
    """Returns what an end is to its caller; which fault it was, only the runner knows."""
    if reason is Reason.UNSPECIFIED:
        return "completed"
    return "left" if reason is Reason.CANCELLED else "failed"


def _words(reason: Reason) -> str:
    return "a complete answer" if reason is Reason.UNSPECIFIED else reason.name.lower()


def proxy_record(sight: ProxySight, contradictions: list[str]) -> receipt_pb2.ProxyRecord:
    """Returns the proxy's part of a receipt."""
    record = receipt_pb2.ProxyRecord(
        status=sight.status,
        flags=sight.flags,
        details=sight.details,
        endpoint=sight.endpoint,
        attempt_count=sight.attempt_count,
        answer_bytes=sight.answer_bytes,
        disagreements=contradictions,
    )
    if sight.first_byte_seconds is not None:
        set_seconds(record.time_to_first_byte, sight.first_byte_seconds)
    return record
