"""Frames to and from their messages. What a peer sent is checked here, before anything is done with it."""

import re
from collections.abc import Iterable, Sequence

import grpc
from google.protobuf import duration_pb2
from grpc_status import rpc_status

from weft.api.router.v1 import relay_service_pb2 as pb
from weft.kernel.errors import WeftError
from weft.kernel.rpc import error_to_status
from weft.link.frames import (
    MAX_CALL_METADATA_BYTES,
    MAX_FRAMES_AT_ONCE,
    MAX_METHOD_CHARS,
    MAX_PART_BYTES,
    MAX_STATUS_MESSAGE_CHARS,
    CallStatus,
    Cancel,
    Credit,
    End,
    Frame,
    HalfClose,
    LinkProtocolError,
    Metadata,
    Part,
    Start,
)

MAX_TIMEOUT_SECONDS = 366 * 86_400.0
_METHOD = re.compile(r"/[A-Za-z0-9_.]+/[A-Za-z0-9_]+")
_KEY = re.compile(r"[0-9a-z_.-]{1,256}")
_TEXT = re.compile(rb"[\x20-\x7e]*")
_BINARY_SUFFIX = "-bin"
# Entries that belong to one connection and mean nothing on the next.
_HOP_KEYS = frozenset({"user-agent", "te", "content-type", "host"})
STATUS_DETAILS = "grpc-status-details-bin"
"""The one entry of gRPC's own that is the callee's: a google.rpc.Status."""


def is_method(name: str) -> bool:
    """Whether a link can carry calls of a method so called."""
    return len(name) <= MAX_METHOD_CHARS and _METHOD.fullmatch(name) is not None


def forwardable(metadata: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    """The entries of a call's metadata that are its caller's and not the transport's.

    Without what gRPC lets pass and the other end would take for a breach of the protocol: one caller must not end a
    link for all.
    """
    return tuple((key, value) for key, value in metadata or () if _is_callers(key) and _is_legal(key, value))


def _is_callers(key: str) -> bool:
    return key == STATUS_DETAILS or not (key.startswith(("grpc-", ":")) or key in _HOP_KEYS)


def _is_legal(key: str, value: str | bytes) -> bool:
    if _KEY.fullmatch(key) is None or key.endswith(_BINARY_SUFFIX) != isinstance(value, bytes):
        return False
    return isinstance(value, bytes) or _TEXT.fullmatch(value.encode()) is not None


def to_messages(frames: Iterable[Frame]) -> list[pb.LinkFrame]:
    """The messages of frames."""
    return [_to_message(frame) for frame in frames]


def from_messages(messages: Sequence[pb.LinkFrame]) -> list[Frame]:
    """The frames of messages. Raises LinkProtocolError for one that is none, and for too many of them."""
    if len(messages) > MAX_FRAMES_AT_ONCE:
        raise LinkProtocolError(f"{len(messages)} frames at once")
    return [_from_message(message) for message in messages]


def _to_message(frame: Frame) -> pb.LinkFrame:
    message = pb.LinkFrame(call_id=frame.call_id)
    match frame:
        case Part():
            message.part.data, message.part.more = frame.data, frame.more
        case Credit():
            message.credit = frame.byte_count
        case Start():
            _write_start(message.start, frame)
        case End():
            message.end.code = frame.status.code
            message.end.message = frame.status.message[:MAX_STATUS_MESSAGE_CHARS]
            message.end.trailing_metadata.extend(_to_entries(frame.status.trailing_metadata))
        case HalfClose():
            message.half_close.SetInParent()
        case Cancel():
            message.cancel.SetInParent()
    return message


def _write_start(message: pb.CallStart, start: Start) -> None:
    message.method, message.initial_credit = start.method, start.initial_credit
    message.metadata.extend(_to_entries(start.metadata))
    if start.timeout_seconds is not None:
        seconds = min(max(0.0, start.timeout_seconds), MAX_TIMEOUT_SECONDS)
        message.timeout.FromNanoseconds(int(seconds * 1e9))


def _from_message(message: pb.LinkFrame) -> Frame:
    call_id = message.call_id
    match message.WhichOneof("kind"):
        case "part":
            if len(message.part.data) > MAX_PART_BYTES:
                raise LinkProtocolError(f"a part of {len(message.part.data)} bytes")
            return Part(call_id, message.part.data, message.part.more)
        case "credit":
            return Credit(call_id, message.credit)
        case "start":
            return _read_start(call_id, message.start)
        case "half_close":
            return HalfClose(call_id)
        case "end":
            return End(call_id, _read_status(message.end))
        case "cancel":
            return Cancel(call_id)
        case _:
            raise LinkProtocolError("a frame of a kind that this version does not know")


def _read_start(call_id: int, start: pb.CallStart) -> Start:
    if not is_method(start.method):
        raise LinkProtocolError("a method name that is none")
    timeout = _seconds(start.timeout) if start.HasField("timeout") else None
    return Start(call_id, start.method, _from_entries(start.metadata), timeout, start.initial_credit)


def _read_status(end: pb.CallEnd) -> CallStatus:
    return CallStatus(
        code=end.code,
        message=end.message[:MAX_STATUS_MESSAGE_CHARS],
        trailing_metadata=_from_entries(end.trailing_metadata),
    )


def _seconds(duration: duration_pb2.Duration) -> float:
    return min(max(0.0, duration.seconds + duration.nanos / 1e9), MAX_TIMEOUT_SECONDS)


def _to_entries(metadata: Metadata) -> Iterable[pb.CallMetadata]:
    return (
        pb.CallMetadata(key=key, value=value.encode() if isinstance(value, str) else value) for key, value in metadata
    )


def _from_entries(entries: Sequence[pb.CallMetadata]) -> Metadata:
    if sum(len(entry.key) + len(entry.value) for entry in entries) > MAX_CALL_METADATA_BYTES:
        raise LinkProtocolError(f"more than {MAX_CALL_METADATA_BYTES} bytes of metadata")
    return forwardable([_from_entry(entry) for entry in entries])


def _from_entry(entry: pb.CallMetadata) -> tuple[str, str | bytes]:
    if _KEY.fullmatch(entry.key) is None:
        raise LinkProtocolError("a metadata key that is none")
    if entry.key.endswith(_BINARY_SUFFIX):
        return entry.key, entry.value
    if _TEXT.fullmatch(entry.value) is None:
        raise LinkProtocolError(f"the metadata entry {entry.key} is not printable text")
    return entry.key, entry.value.decode("ascii")


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def status_of(error: WeftError) -> CallStatus:
    """The status that says what an error says, with its details."""
    status = rpc_status.to_status(error_to_status(error))
    return CallStatus(
        code=status.code.value[0],
        message=status.details,
        trailing_metadata=tuple((str(key), value) for key, value in status.trailing_metadata),
    )


def grpc_code(status: CallStatus) -> grpc.StatusCode:
    """The code as gRPC names it; UNKNOWN for a number that has none."""
    return _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
