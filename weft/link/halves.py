"""The two halves of a call on one side: what it receives, and what it has still to send."""

from collections import deque

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.link.frames import (
    MAX_PART_BYTES,
    WINDOW_BYTES,
    End,
    Frame,
    HalfClose,
    LinkProtocolError,
    Part,
    Start,
    part_cost,
)

MESSAGE_OVERHEAD_BYTES = 64
"""What a kept message takes besides its bytes, about."""
CREDIT_STEP_BYTES = WINDOW_BYTES // 4
"""Credit is given back in steps of at least this, so that it does not cost a frame per message."""
MAX_CREDIT_BYTES = 2**31 - 1


class ReceiveHalf:
    """Puts parts together, and knows how much the peer may send.

    Unread messages hold at most one window. A message larger than that is credited while it arrives, but only once all
    before it has been read: a reader that stands still gets one such message and no more.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._inbox: deque[tuple[bytes, int]] = deque()
        self._partial = bytearray()
        self._partial_cost = 0
        self._allowed = WINDOW_BYTES
        self._owed = 0
        self._is_unwanted = False
        self.buffered_bytes = 0

    def take(self, part: Part) -> None:
        """A part arrived. Raises LinkProtocolError beyond the credit, REQUEST_TOO_LARGE for too large a message."""
        cost = part_cost(part.data)
        if cost > self._allowed:
            raise LinkProtocolError(f"call {part.call_id} sent more than its credit")
        self._allowed -= cost
        if self._is_unwanted:
            return
        self._partial_cost += cost
        if len(self._partial) + len(part.data) > self._max_message_bytes:
            raise WeftError(
                Reason.REQUEST_TOO_LARGE, f"a message on a link may have at most {self._max_message_bytes} bytes"
            )
        self.buffered_bytes += len(part.data)
        if part.more:
            self._partial += part.data
            self._credit_partial()
            return
        self._inbox.append((self._with_partial(part.data), self._partial_cost))
        self.buffered_bytes += MESSAGE_OVERHEAD_BYTES
        self._partial, self._partial_cost = bytearray(), 0

    def read(self) -> bytes | None:
        """The next whole message, if one is there."""
        if not self._inbox:
            return None
        message, cost = self._inbox.popleft()
        self.buffered_bytes -= len(message) + MESSAGE_OVERHEAD_BYTES
        self._owed += cost
        self._credit_partial()
        return message

    def take_credit(self) -> int:
        """Bytes to credit the peer with now; 0 when it is not worth a frame yet."""
        if self._owed < CREDIT_STEP_BYTES:
            return 0
        owed, self._owed = self._owed, 0
        self._allowed += owed
        return owed

    @property
    def credit_is_due(self) -> bool:
        """Whether `take_credit` has something."""
        return self._owed >= CREDIT_STEP_BYTES

    def clear(self) -> None:
        """Forget what was not read, and drop what still comes."""
        self._is_unwanted = True
        self._inbox.clear()
        self._partial = bytearray()
        self.buffered_bytes = 0

    def _with_partial(self, data: bytes) -> bytes:
        if not self._partial:
            return data
        self._partial += data
        return bytes(self._partial)

    def _credit_partial(self) -> None:
        if not self._inbox:
            self._owed += self._partial_cost
            self._partial_cost = 0


class SendHalf:
    """What is to be sent, in order: the start, messages cut into parts, and the last word."""

    def __init__(self, call_id: int, credit: int, start: Start | None = None) -> None:
        self._call_id = call_id
        self._credit = credit
        self._start = start
        self._messages: deque[bytes] = deque()
        self._offset = 0
        self._last: HalfClose | End | None = None
        self.is_closed = False
        """Whether the last word has been said, sent or not."""
        self.unsent_bytes = 0

    @property
    def is_begun(self) -> bool:
        """Whether the peer may know of the call."""
        return self._start is None

    @property
    def is_sendable(self) -> bool:
        """Whether `next_frame` has one."""
        return self._start is not None or (self._credit > 0 if self._messages else self._last is not None)

    def put(self, message: bytes) -> None:
        """Send a message when its turn comes."""
        assert not self.is_closed, "a message after the last word"
        self._messages.append(message)
        self.unsent_bytes += len(message) + MESSAGE_OVERHEAD_BYTES

    def close(self, last: HalfClose | End) -> None:
        """Say the last word once everything before it was sent."""
        self._last, self.is_closed = last, True

    def add_credit(self, byte_count: int) -> None:
        """The peer has room. Raises LinkProtocolError for an impossible amount."""
        if byte_count <= 0 or self._credit + byte_count > MAX_CREDIT_BYTES:
            raise LinkProtocolError(f"call {self._call_id} got {byte_count} bytes of credit")
        self._credit += byte_count

    def next_frame(self) -> Frame:
        """The next frame; only while `is_sendable`."""
        if self._start is not None:
            start, self._start = self._start, None
            return start
        if self._messages:
            return self._next_part()
        last, self._last = self._last, None
        assert last is not None, "next_frame with nothing to send"
        return last

    def clear(self) -> None:
        """Forget what was not sent."""
        self._start = self._last = None
        self._messages.clear()
        self.is_closed = True
        self.unsent_bytes = 0

    def _next_part(self) -> Part:
        message = self._messages[0]
        end = min(len(message), self._offset + min(MAX_PART_BYTES, self._credit))
        data = message if self._offset == 0 and end == len(message) else message[self._offset : end]
        self._credit -= part_cost(data)
        self.unsent_bytes -= len(data)
        more = end < len(message)
        self._offset = end if more else 0
        if not more:
            self._messages.popleft()
            self.unsent_bytes -= MESSAGE_OVERHEAD_BYTES
        return Part(self._call_id, data, more)
