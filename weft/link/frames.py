"""Frames of a link: limits, validation, metadata and statuses.

A frame is a `link_pb2.LinkFrame`, the status of a call a `link_pb2.CallEnd`. Do not change either once it was sent,
received or stored.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from enum import IntEnum

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from grpc_status import rpc_status

from weft.api.common.v1 import link_pb2 as pb
from weft.kernel.channels.rpc import error_from_details, error_to_status
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

WINDOW_BYTES = 256 * 1024
"""Bytes that either side of a call may send before the other has read any."""
MAX_PART_BYTES = 64 * 1024
"""Maximum size of a message, or a part of one, in a frame."""
EMPTY_PART_COST = 1
"""Bytes of credit that an empty part uses, so that their number is bounded; another uses as many as it has."""
MAX_FRAMES_AT_ONCE = 8192
"""Maximum number of frames in a message; processing more in one step would delay other links."""
MAX_METHOD_CHARS = 256
MAX_CALL_METADATA_BYTES = 32 * 1024
MAX_STATUS_MESSAGE_CHARS = 8 * 1024
MAX_TIMEOUT_SECONDS = 366 * 86_400.0

Metadata = tuple[tuple[str, str | bytes], ...]
"""Metadata of a call: values are bytes if the key ends in "-bin", text otherwise."""


class Side(IntEnum):
    """The side that began a call; the value is the remainder of its call ids modulo 2."""

    ROUTER = 0
    RUNNER = 1


class LinkProtocolError(WeftError):
    """The peer violated the protocol; the link ends."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.MALFORMED_REQUEST, f"the peer broke the link's protocol: {message}")


def check_frame(frame: pb.LinkFrame) -> str:
    """Returns the kind of a received frame. Cuts a status message that is too long.

    Raises LinkProtocolError for an invalid frame.
    """
    kind = frame.WhichOneof("kind")
    match kind:
        case "part":
            if len(frame.part.data) > MAX_PART_BYTES:
                raise LinkProtocolError(f"a part of {len(frame.part.data)} bytes")
        case "start":
            if not is_method(frame.start.method):
                raise LinkProtocolError("an invalid method name")
            _check_metadata(frame.start.metadata)
        case "end":
            if frame.end.trailing_metadata:
                _check_metadata(frame.end.trailing_metadata)
            if len(frame.end.message) > MAX_STATUS_MESSAGE_CHARS:
                frame.end.message = frame.end.message[:MAX_STATUS_MESSAGE_CHARS]
        case None:
            raise LinkProtocolError("a frame of a kind that this version does not know")
    return kind


def new_start(method: str, metadata: Metadata = (), timeout_seconds: float | None = None) -> pb.CallStart:
    """Returns the start of a call; `timeout_seconds` is the time until its deadline."""
    start = pb.CallStart(method=method, metadata=_to_entries(metadata), initial_credit=WINDOW_BYTES)
    if timeout_seconds is not None:
        nanoseconds = int(min(max(0.0, timeout_seconds), MAX_TIMEOUT_SECONDS) * 1e9)
        start.timeout.seconds, start.timeout.nanos = divmod(nanoseconds, 1_000_000_000)
    return start


def timeout_of(start: pb.CallStart) -> float | None:
    """Returns the seconds from the start of a call to its deadline; None if it has none."""
    if not start.HasField("timeout"):
        return None
    return min(max(0.0, start.timeout.seconds + start.timeout.nanos / 1e9), MAX_TIMEOUT_SECONDS)


def new_status(code: int, message: str, trailing_metadata: Metadata) -> pb.CallEnd:
    """Returns the status of a call; `code` is a google.rpc.Code."""
    message = message[:MAX_STATUS_MESSAGE_CHARS]
    return pb.CallEnd(code=code, message=message, trailing_metadata=_to_entries(trailing_metadata))


def status_of(error: WeftError) -> pb.CallEnd:
    """Returns the status for an error, with its details."""
    status = rpc_status.to_status(error_to_status(error))
    return new_status(status.code.value[0], status.details, status.trailing_metadata)


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def grpc_code(status: pb.CallEnd) -> grpc.StatusCode:
    """Returns the gRPC code of a status; UNKNOWN for an unknown number."""
    return _CODES.get(status.code, grpc.StatusCode.UNKNOWN)


def error_of(status: pb.CallEnd) -> WeftError:
    """Returns the error in a status that is not OK; INTERNAL if its details have no reason."""
    found: WeftError | None = None
    for entry in status.trailing_metadata:
        if entry.key == STATUS_DETAILS:
            with suppress(DecodeError):
                found = error_from_details(status_pb2.Status.FromString(entry.value))
    return found or WeftError(Reason.INTERNAL, status.message)


_METHOD = re.compile(r"/[A-Za-z0-9_.]+/[A-Za-z0-9_]+")
_KEY = re.compile(r"[0-9a-z_.-]{1,256}")
_TEXT = re.compile(rb"[\x20-\x7e]*")
_BINARY_SUFFIX = "-bin"
# Keys that belong to one connection.
_HOP_KEYS = frozenset({"user-agent", "te", "content-type", "host"})
STATUS_DETAILS = "grpc-status-details-bin"
"""The only gRPC entry that is set by the callee: a google.rpc.Status."""


def is_method(name: str) -> bool:
    """Whether a link can carry calls to this method."""
    return len(name) <= MAX_METHOD_CHARS and _METHOD.fullmatch(name) is not None


def forwardable(metadata: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    """Returns the valid metadata entries of the caller, without the transport's.

    Drops entries that gRPC accepts but the peer would treat as a protocol violation, so that one caller cannot end the
    link for all.
    """
    return tuple((key, value) for key, value in metadata or () if _is_callers(key) and _is_legal(key, value))


def metadata_of(entries: Iterable[pb.CallMetadata]) -> Metadata:
    """Returns the caller's metadata in validated entries, without the transport's."""
    return tuple(
        [
            (entry.key, entry.value if entry.key.endswith(_BINARY_SUFFIX) else entry.value.decode("ascii"))
            for entry in entries
            if _is_callers(entry.key)
        ]
    )


def _is_callers(key: str) -> bool:
    return key == STATUS_DETAILS or not (key.startswith(("grpc-", ":")) or key in _HOP_KEYS)


def _is_legal(key: str, value: str | bytes) -> bool:
    if _KEY.fullmatch(key) is None or key.endswith(_BINARY_SUFFIX) != isinstance(value, bytes):
        return False
    return isinstance(value, bytes) or _TEXT.fullmatch(value.encode()) is not None


def _to_entries(metadata: Metadata) -> Iterable[pb.CallMetadata]:
    return [
        pb.CallMetadata(key=key, value=value.encode() if isinstance(value, str) else value) for key, value in metadata
    ]


def _check_metadata(entries: Iterable[pb.CallMetadata]) -> None:
    size = 0
    for entry in entries:
        key, value = entry.key, entry.value
        size += len(key) + len(value)
        if size > MAX_CALL_METADATA_BYTES:
            raise LinkProtocolError(f"more than {MAX_CALL_METADATA_BYTES} bytes of metadata")
        if _KEY.fullmatch(key) is None:
            raise LinkProtocolError("an invalid metadata key")
        if not key.endswith(_BINARY_SUFFIX) and _TEXT.fullmatch(value) is None:
            raise LinkProtocolError(f"the metadata entry {key} is not printable text")


GAVE_UP = status_of(WeftError(Reason.CANCELLED, "the caller gave up"))
"""Status of a call that its caller has cancelled. Created once, because it takes 13 us."""
