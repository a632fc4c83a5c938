"""Frames to and from their messages. What a peer sent is checked here, before anything is done with it."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import grpc
from google.protobuf import duration_pb2
from grpc_status import rpc_status

from weft.api.router.v1 import relay_service_pb2 as pb
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_to_status

WINDOW_BYTES = 256 * 1024
"""Bytes that either side of a call may send before the other has read some of them."""
MAX_PART_BYTES = 64 * 1024
FRAME_OVERHEAD_BYTES = 16
"""Approximate overhead of a frame or a metadata entry."""
MAX_FRAMES_AT_ONCE = 8192
"""Maximum number of frames in one message; processing more at once would delay other links."""
MAX_METHOD_CHARS = 256
MAX_CALL_METADATA_BYTES = 32 * 1024
MAX_STATUS_MESSAGE_CHARS = 8 * 1024
MAX_CALL_ID = 2**32 - 1

Metadata = tuple[tuple[str, str | bytes], ...]
"""Metadata of a call: bytes where the key ends in "-bin", text otherwise."""


class Side(IntEnum):
    """The side that began a call; the value is the remainder of its call ids by two."""

    ROUTER = 0
    RUNNER = 1


class LinkProtocolError(WeftError):
    """The peer violated the protocol; the link ends."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.MALFORMED_REQUEST, f"the peer broke the link's protocol: {message}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStatus:
    """How a call ended."""

    code: int = 0
    """A google.rpc.Code."""
    message: str = ""
    trailing_metadata: Metadata = ()


@dataclass(frozen=True, slots=True)
class Start:
    """The caller begins a call."""

    call_id: int
    method: str
    metadata: Metadata = ()
    timeout_seconds: float | None = None
    initial_credit: int = WINDOW_BYTES


@dataclass(frozen=True, slots=True)
class Part:
    """A message or a part of one, at most MAX_PART_BYTES."""

    call_id: int
    data: bytes
    more: bool = False


@dataclass(frozen=True, slots=True)
class HalfClose:
    """The caller sends no more messages."""

    call_id: int


@dataclass(frozen=True, slots=True)
class End:
    """The callee ends the call."""

    call_id: int
    status: CallStatus


@dataclass(frozen=True, slots=True)
class Cancel:
    """The caller cancels the call."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Credit:
    """The peer may send this many more bytes."""

    call_id: int
    byte_count: int


Frame = Start | Part | HalfClose | End | Cancel | Credit


def frame_bytes(frame: Frame) -> int:
    """Approximate bytes of a frame on the wire."""
    match frame:
        case Part():
            return FRAME_OVERHEAD_BYTES + len(frame.data)
        case Start():
            return FRAME_OVERHEAD_BYTES + len(frame.method) + _metadata_bytes(frame.metadata)
        case End():
            status = frame.status
            return FRAME_OVERHEAD_BYTES + len(status.message) + _metadata_bytes(status.trailing_metadata)
        case _:
            return FRAME_OVERHEAD_BYTES


def _metadata_bytes(metadata: Metadata) -> int:
    return sum(FRAME_OVERHEAD_BYTES + len(key) + len(value) for key, value in metadata)


def part_cost(data: bytes) -> int:
    """Credit that a part uses. An empty part costs one byte, or a flood of them would have no bound."""
    return max(1, len(data))


MAX_TIMEOUT_SECONDS = 366 * 86_400.0
_METHOD = re.compile(r"/[A-Za-z0-9_.]+/[A-Za-z0-9_]+")
_KEY = re.compile(r"[0-9a-z_.-]{1,256}")
_TEXT = re.compile(rb"[\x20-\x7e]*")
_BINARY_SUFFIX = "-bin"
# Entries that belong to one connection.
_HOP_KEYS = frozenset({"user-agent", "te", "content-type", "host"})
STATUS_DETAILS = "grpc-status-details-bin"
"""The only entry of gRPC's own that belongs to the callee: a google.rpc.Status."""


def is_method(name: str) -> bool:
    """Whether a link can carry calls of the method with this name."""
    return len(name) <= MAX_METHOD_CHARS and _METHOD.fullmatch(name) is not None


def forwardable(metadata: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    """Returns the metadata entries that are the caller's and not the transport's.

    Without entries that gRPC accepts and the other end would treat as a protocol violation: one caller must not end
    the link of all.
    """
    return tuple((key, value) for key, value in metadata or () if _is_callers(key) and _is_legal(key, value))


def _is_callers(key: str) -> bool:
    return key == STATUS_DETAILS or not (key.startswith(("grpc-", ":")) or key in _HOP_KEYS)


def _is_legal(key: str, value: str | bytes) -> bool:
    if _KEY.fullmatch(key) is None or key.endswith(_BINARY_SUFFIX) != isinstance(value, bytes):
        return False
    return isinstance(value, bytes) or _TEXT.fullmatch(value.encode()) is not None


def to_messages(frames: Iterable[Frame]) -> list[pb.LinkFrame]:
    """Converts frames to messages."""
    return [_to_message(frame) for frame in frames]


def from_messages(messages: Sequence[pb.LinkFrame]) -> list[Frame]:
    """Converts messages to frames. Raises LinkProtocolError for an invalid one, and for too many of them."""
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
        raise LinkProtocolError("an invalid method name")
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
        raise LinkProtocolError("an invalid metadata key")
    if entry.key.endswith(_BINARY_SUFFIX):
        return entry.key, entry.value
    if _TEXT.fullmatch(entry.value) is None:
        raise LinkProtocolError(f"the metadata entry {entry.key} is not printable text")
    return entry.key, entry.value.decode("ascii")


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def status_of(error: WeftError) -> CallStatus:
    """Returns the status for an error, with its details."""
    status = rpc_status.to_status(error_to_status(error))
    return CallStatus(
        code=status.code.value[0],
        message=status.details,
        trailing_metadata=tuple((str(key), value) for key, value in status.trailing_metadata),
    )


def grpc_code(status: CallStatus) -> grpc.StatusCode:
    """Returns gRPC's code of a status; UNKNOWN for an unknown number."""
    return _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
