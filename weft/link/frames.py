"""What travels on a link, as values: the steps of calls, and the bounds of each."""

from dataclasses import dataclass
from enum import IntEnum

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

WINDOW_BYTES = 256 * 1024
"""What either side of a call may send before the other has used some of it up."""
MAX_PART_BYTES = 64 * 1024
FRAME_OVERHEAD_BYTES = 16
"""What a frame or a metadata entry takes besides its bytes, about."""
MAX_FRAMES_AT_ONCE = 8192
"""Frames that travel together; a peer that sends more would keep everybody else waiting while they are looked at."""
MAX_METHOD_CHARS = 256
MAX_CALL_METADATA_BYTES = 32 * 1024
MAX_STATUS_MESSAGE_CHARS = 8 * 1024
MAX_CALL_ID = 2**32 - 1

Metadata = tuple[tuple[str, str | bytes], ...]
"""Metadata of a call: bytes where the key ends in "-bin", text otherwise."""


class Side(IntEnum):
    """Who began a call, and which call ids are whose: the value is the remainder of the id by two."""

    ROUTER = 0
    RUNNER = 1


class LinkProtocolError(WeftError):
    """The peer broke the rules of the link, which cannot go on."""

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
    """A call begins."""

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
    """The caller gives the call up."""

    call_id: int


@dataclass(frozen=True, slots=True)
class Credit:
    """So many bytes more may be sent."""

    call_id: int
    byte_count: int


Frame = Start | Part | HalfClose | End | Cancel | Credit


def frame_bytes(frame: Frame) -> int:
    """Bytes a frame takes on the wire, about."""
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
    """Bytes of credit a part uses. An empty one counts as one, or a flood of them would have no bound."""
    return max(1, len(data))
