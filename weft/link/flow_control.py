"""Flow control of calls on a link, and the schedule by which calls take turns to send."""

from collections import deque
from collections.abc import Callable

from weft.api.common.v1 import link_pb2 as pb
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.link.frames import MAX_PART_BYTES, WINDOW_BYTES, LinkProtocolError, part_cost

MESSAGE_OVERHEAD_BYTES = 64
"""Approximate memory of a buffered message besides its bytes."""
CREDIT_STEP_BYTES = WINDOW_BYTES // 4
"""Minimum step in which credit is returned, so that it does not cost a frame per message."""
MAX_CREDIT_BYTES = 2**31 - 1


class ReceiveHalf:
    """Received parts, joined into messages, and the peer's remaining credit.

    Unread messages hold at most one window. A larger message is credited while it arrives, but only once all messages
    before it were read, so that a stopped reader gets at most one of them.
    """

    __slots__ = (
        "_allowed",
        "_inbox",
        "_is_unwanted",
        "_max_message_bytes",
        "_owed",
        "_partial",
        "_partial_cost",
        "buffered_bytes",
    )

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._inbox: deque[tuple[bytes, int]] | None = None
        """None while empty, which saves 700 bytes per idle call."""
        self._partial: bytes | bytearray = b""
        self._partial_cost = 0
        self._allowed = WINDOW_BYTES
        self._owed = 0
        self._is_unwanted = False
        self.buffered_bytes = 0

    def take(self, data: bytes, *, more: bool) -> None:
        """Adds a part. Raises LinkProtocolError beyond the credit, REQUEST_TOO_LARGE if the message is too large."""
        cost = part_cost(data)
        if cost > self._allowed:
            raise LinkProtocolError("a call sent more than its credit")
        self._allowed -= cost
        if self._is_unwanted:
            return
        self._partial_cost += cost
        if len(self._partial) + len(data) > self._max_message_bytes:
            raise WeftError(
                Reason.REQUEST_TOO_LARGE, f"a message on a link may have at most {self._max_message_bytes} bytes"
            )
        self.buffered_bytes += len(data)
        if more:
            self._partial = self._partial or bytearray()
            self._partial += data
            self._credit_partial()
            return
        if self._inbox is None:
            self._inbox = deque()
        if self._partial:
            self._partial += data
            data = bytes(self._partial)
        self._inbox.append((data, self._partial_cost))
        self.buffered_bytes += MESSAGE_OVERHEAD_BYTES
        self._partial, self._partial_cost = b"", 0

    def read(self) -> bytes | None:
        """Returns the next complete message; None if there is none yet."""
        if not self._inbox:
            return None
        message, cost = self._inbox.popleft()
        if not self._inbox:
            self._inbox = None
        self.buffered_bytes -= len(message) + MESSAGE_OVERHEAD_BYTES
        self._owed += cost
        self._credit_partial()
        return message

    def take_credit(self) -> int:
        """Returns the bytes to credit to the peer now; 0: not worth a frame yet."""
        if self._owed < CREDIT_STEP_BYTES:
            return 0
        owed, self._owed = self._owed, 0
        self._allowed += owed
        return owed

    @property
    def credit_is_due(self) -> bool:
        """Whether `take_credit` would return more than 0."""
        return self._owed >= CREDIT_STEP_BYTES

    def clear(self) -> None:
        """Drops unread data, and data that still arrives."""
        self._is_unwanted = True
        self._inbox = None
        self._partial = b""
        self.buffered_bytes = 0

    def _credit_partial(self) -> None:
        if not self._inbox:
            self._owed += self._partial_cost
            self._partial_cost = 0


class SendHalf:
    """Unsent frames of a call, in order: the start, messages cut into parts, and the closing frame."""

    __slots__ = ("_call_id", "_credit", "_last", "_messages", "_offset", "_start", "is_closed", "unsent_bytes")

    def __init__(self, call_id: int, credit: int, start: pb.CallStart | None = None) -> None:
        """`start` is sent first; None for a call of the peer."""
        self._call_id = call_id
        self._credit = credit
        self._start = start
        self._messages: deque[bytes] | None = None
        self._offset = 0
        self._last: pb.LinkFrame | None = None
        self.is_closed = False
        """Whether there is a closing frame, sent or not."""
        self.unsent_bytes = 0

    @property
    def is_begun(self) -> bool:
        """Whether the start was sent, so that the peer may know of the call."""
        return self._start is None

    @property
    def is_sendable(self) -> bool:
        """Whether a frame can be sent now."""
        return self._start is not None or (self._credit > 0 if self._messages else self._last is not None)

    @property
    def is_over(self) -> bool:
        """Whether the closing frame was sent."""
        return self.is_closed and self._last is None

    def put(self, message: bytes) -> None:
        """Adds a message to send."""
        assert not self.is_closed, "a message after the closing frame"
        if self._messages is None:
            self._messages = deque()
        self._messages.append(message)
        self.unsent_bytes += len(message) + MESSAGE_OVERHEAD_BYTES

    def close(self, last: pb.LinkFrame) -> None:
        """Adds the closing frame."""
        self._last, self.is_closed = last, True

    def add_credit(self, byte_count: int) -> None:
        """Adds credit from the peer. Raises LinkProtocolError for an impossible amount."""
        if byte_count <= 0 or self._credit + byte_count > MAX_CREDIT_BYTES:
            raise LinkProtocolError(f"call {self._call_id} got {byte_count} bytes of credit")
        self._credit += byte_count

    def next_frame(self) -> pb.LinkFrame:
        """Returns the next frame; only while `is_sendable`."""
        if self._start is not None:
            start, self._start = self._start, None
            return pb.LinkFrame(call_id=self._call_id, start=start)
        if self._messages:
            return self._next_part()
        last, self._last = self._last, None
        assert last is not None, "next_frame with nothing to send"
        return last

    def clear(self) -> None:
        """Drops unsent frames."""
        self._start = self._last = None
        self._messages = None
        self.is_closed = True
        self.unsent_bytes = 0

    def _next_part(self) -> pb.LinkFrame:
        messages = self._messages
        assert messages, "a part without a message"
        message = messages[0]
        end = min(len(message), self._offset + min(MAX_PART_BYTES, self._credit))
        data = message if self._offset == 0 and end == len(message) else message[self._offset : end]
        self._credit -= part_cost(data)
        self.unsent_bytes -= len(data)
        more = end < len(message)
        self._offset = end if more else 0
        if not more:
            messages.popleft()
            self._messages = messages or None
            self.unsent_bytes -= MESSAGE_OVERHEAD_BYTES
        frame = pb.LinkFrame(call_id=self._call_id)
        # Set in place: passing a part to the constructor would copy it.
        frame.part.data, frame.part.more = data, more
        return frame


class Call:
    """One side's state of a call. Only the multiplexer creates and changes it."""

    __slots__ = ("call_id", "is_own", "is_scheduled", "peer_is_done", "receive", "send", "start", "status")

    def __init__(
        self, call_id: int, start: pb.CallStart, send: SendHalf, receive: ReceiveHalf, *, is_own: bool
    ) -> None:
        self.call_id = call_id
        self.start = start
        self.is_own = is_own
        self.send = send
        self.receive = receive
        self.is_scheduled = False
        """Whether it is in the send schedule."""
        self.peer_is_done = False
        """Whether no more messages will arrive."""
        self.status: pb.CallEnd | None = None
        """Final status, once the call has ended; for a call of the peer also its cancellation."""

    def close(self, status: pb.CallEnd) -> None:
        """Ends the call with a status, unless it has one, and expects no more messages."""
        if self.status is None:
            self.status = status
        self.peer_is_done = True


class SendSchedule:
    """The order of frames: urgent ones, then credit, then one frame of each sendable call in turn."""

    def __init__(self, note_work: Callable[[], None]) -> None:
        """`note_work` is called whenever there is a frame to send."""
        self._note_work = note_work
        self._urgent: deque[pb.LinkFrame] = deque()
        self._credit_due: dict[int, Call] = {}
        self._turns: deque[Call] = deque()
        self.unsent_bytes = 0
        """Messages waiting to be sent, over all calls."""

    def __bool__(self) -> bool:
        """Whether there is a frame to send."""
        return bool(self._urgent or self._credit_due or self._turns)

    def put(self, call: Call, message: bytes) -> None:
        """Adds a message of a call."""
        before = call.send.unsent_bytes
        call.send.put(message)
        self.unsent_bytes += call.send.unsent_bytes - before
        self.add(call)

    def put_urgent(self, frame: pb.LinkFrame) -> None:
        """Adds a frame that overtakes all messages."""
        self._urgent.append(frame)
        self._note_work()

    def add(self, call: Call) -> None:
        """Schedules a call if it has something to send."""
        if not call.is_scheduled and call.send.is_sendable:
            call.is_scheduled = True
            self._turns.append(call)
            self._note_work()

    def add_credit(self, call: Call) -> None:
        """Schedules credit for what was read of a call."""
        self._credit_due[call.call_id] = call
        self._note_work()

    def drop_credit(self, call: Call) -> None:
        """Sends no credit for a call that has ended."""
        self._credit_due.pop(call.call_id, None)

    def drop_unsent(self, call: Call) -> None:
        """Drops the unsent frames of a call."""
        self.unsent_bytes -= call.send.unsent_bytes
        call.send.clear()
        if call.is_scheduled:
            call.is_scheduled = False
            self._turns.remove(call)

    def clear(self) -> None:
        """Drops every frame."""
        self._urgent.clear()
        self._credit_due.clear()
        self._turns.clear()

    def next(self) -> tuple[pb.LinkFrame, Call | None, bool] | None:
        """Returns the next frame, its call, and whether it ends the call; None: there is none.

        The call is None for urgent frames and credit.
        """
        if self._urgent:
            return self._urgent.popleft(), None, True
        if self._credit_due:
            call_id, call = next(iter(self._credit_due.items()))
            del self._credit_due[call_id]
            return pb.LinkFrame(call_id=call_id, credit=call.receive.take_credit()), None, False
        if not self._turns:
            return None
        call = self._turns.popleft()
        send = call.send
        before = send.unsent_bytes
        frame = send.next_frame()
        self.unsent_bytes += send.unsent_bytes - before
        call.is_scheduled = send.is_sendable
        if call.is_scheduled:
            self._turns.append(call)
        return frame, call, send.is_over and not call.is_own
