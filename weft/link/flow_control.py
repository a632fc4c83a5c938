"""Flow control of calls on a link, and the schedule by which calls take turns to send."""

from collections import deque
from collections.abc import Callable

from weft.api.common.v1 import link_pb2 as pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.link.frames import EMPTY_PART_COST, MAX_FRAMES_AT_ONCE, MAX_PART_BYTES, WINDOW_BYTES, LinkProtocolError

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
        *("_allowed", "_inbox", "_is_unwanted", "_max_message_bytes", "_partial", "_partial_cost"),
        *("buffered_bytes", "owed_bytes"),
    )

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._inbox: deque[tuple[bytes, int]] | None = None
        """None while empty, which saves 700 bytes per idle call."""
        self._partial: bytes | bytearray = b""
        self._partial_cost = 0
        self._allowed = WINDOW_BYTES
        self.owed_bytes = 0
        """Bytes that were read and not yet credited to the peer."""
        self._is_unwanted = False
        self.buffered_bytes = 0

    def take(self, data: bytes, *, more: bool) -> None:
        """Adds a part. Raises LinkProtocolError beyond the credit, REQUEST_TOO_LARGE if the message is too large."""
        size = len(data)
        cost = size or EMPTY_PART_COST
        if cost > self._allowed:
            raise LinkProtocolError("a call sent more than its credit")
        self._allowed -= cost
        if self._is_unwanted:
            return
        self._partial_cost += cost
        if len(self._partial) + size > self._max_message_bytes:
            raise WeftError(
                Reason.REQUEST_TOO_LARGE, f"a message on a link may have at most {self._max_message_bytes} bytes"
            )
        self.buffered_bytes += size
        if more:
            self._partial = self._partial or bytearray()
            self._partial += data
            if not self._inbox:
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
        self.buffered_bytes -= len(message) + MESSAGE_OVERHEAD_BYTES
        self.owed_bytes += cost
        if not self._inbox:
            self._inbox = None
            if self._partial_cost:
                self._credit_partial()
        return message

    def take_credit(self) -> int:
        """Returns the bytes to credit to the peer now; 0: not worth a frame yet."""
        if self.owed_bytes < CREDIT_STEP_BYTES:
            return 0
        owed, self.owed_bytes = self.owed_bytes, 0
        self._allowed += owed
        return owed

    def clear(self) -> None:
        """Drops unread data, and data that still arrives."""
        self._is_unwanted = True
        self._inbox = None
        self._partial = b""
        self.buffered_bytes = 0

    def _credit_partial(self) -> None:
        self.owed_bytes += self._partial_cost
        self._partial_cost = 0


class SendHalf:
    """Unsent frames of a call, in order: the start, messages cut into parts, and the closing frame."""

    __slots__ = (
        *("_call_id", "_credit", "_last", "_messages", "_offset", "_start"),
        *("is_closed", "is_over", "is_sendable", "unsent_bytes"),
    )

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
        self.is_over = False
        """Whether the closing frame was sent."""
        self.is_sendable = start is not None
        """Whether a frame can be sent now."""
        self.unsent_bytes = 0

    @property
    def is_begun(self) -> bool:
        """Whether the start was sent, so that the peer may know of the call."""
        return self._start is None

    def put(self, message: bytes) -> int:
        """Adds a message to send; returns by how much `unsent_bytes` grew."""
        assert not self.is_closed, "a message after the closing frame"
        if self._messages is None:
            self._messages = deque()
        self._messages.append(message)
        self.is_sendable = self.is_sendable or self._credit > 0
        size = len(message) + MESSAGE_OVERHEAD_BYTES
        self.unsent_bytes += size
        return size

    def close(self, last: pb.LinkFrame) -> None:
        """Adds the closing frame."""
        self._last, self.is_closed = last, True
        self.is_sendable = self.is_sendable or not self._messages

    def add_credit(self, byte_count: int) -> None:
        """Adds credit from the peer. Raises LinkProtocolError for an impossible amount."""
        if byte_count <= 0 or self._credit + byte_count > MAX_CREDIT_BYTES:
            raise LinkProtocolError(f"call {self._call_id} got {byte_count} bytes of credit")
        self._credit += byte_count
        self.is_sendable = self.is_sendable or bool(self._messages)

    def next_frame(self) -> pb.LinkFrame:
        """Returns the next frame; only while `is_sendable`."""
        if self._start is not None:
            frame = pb.LinkFrame(call_id=self._call_id, start=self._start)
            self._start = None
        elif self._messages:
            frame = self._next_part(self._messages)
        else:
            assert self._last is not None, "next_frame with nothing to send"
            frame, self._last, self.is_over = self._last, None, True
        self.is_sendable = self._credit > 0 if self._messages else self._last is not None
        return frame

    def clear(self) -> None:
        """Drops unsent frames."""
        self._start = self._last = None
        self._messages = None
        self.is_closed = self.is_over = True
        self.is_sendable = False
        self.unsent_bytes = 0

    def _next_part(self, messages: deque[bytes]) -> pb.LinkFrame:
        message, begin = messages[0], self._offset
        size = len(message) - begin
        more = size > MAX_PART_BYTES or size > self._credit
        if more:
            size = min(MAX_PART_BYTES, self._credit)
        data = message[begin : begin + size] if begin or more else message
        self._credit -= size or EMPTY_PART_COST
        self.unsent_bytes -= size
        self._offset = begin + size if more else 0
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

    __slots__ = (
        "call_id",
        "is_answered",
        "is_own",
        "is_scheduled",
        "peer_is_done",
        "received",
        "start",
        "status",
        "unsent",
    )

    def __init__(
        self, call_id: int, start: pb.CallStart, unsent: SendHalf, received: ReceiveHalf, *, is_own: bool
    ) -> None:
        self.call_id = call_id
        self.start = start
        """Method, metadata and deadline from the caller."""
        self.is_own = is_own
        self.unsent = unsent
        self.received = received
        self.is_scheduled = False
        """Whether it is in the send schedule."""
        self.peer_is_done = False
        """Whether no more messages will arrive."""
        self.status: pb.CallEnd | None = None
        """Final status, once the call has ended; for a call of the peer also its cancellation."""
        self.is_answered = False
        """Whether the status of an own call is from the peer."""

    def finish(self, status: pb.CallEnd) -> None:
        """Ends the call with a status, unless it has one, and expects no more messages."""
        if self.status is None:
            self.status = status
        self.peer_is_done = True

    def wake(self) -> None:
        """Called for what `CallReadable` tells, and when the stream is lost."""

    def note_sent(self) -> None:
        """Called when frames of the call were sent."""


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
        self.unsent_bytes += call.unsent.put(message)
        if not call.is_scheduled:
            self.add(call)

    def put_urgent(self, frame: pb.LinkFrame) -> None:
        """Adds a frame that overtakes all messages."""
        self._urgent.append(frame)
        self._note_work()

    def add(self, call: Call) -> None:
        """Schedules a call if it has something to send."""
        if not call.is_scheduled and call.unsent.is_sendable:
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
        self.unsent_bytes -= call.unsent.unsent_bytes
        call.unsent.clear()
        if call.is_scheduled:
            call.is_scheduled = False
            self._turns.remove(call)

    def clear(self) -> None:
        """Drops every frame."""
        self._urgent.clear()
        self._credit_due.clear()
        self._turns.clear()

    def take(self, max_bytes: int) -> tuple[list[pb.LinkFrame], dict[Call, None], list[int]]:
        """Returns frames to send now, about `max_bytes` together, their calls, and the ids of calls that end with them.

        Urgent frames and credit have no calls.
        """
        frames: list[pb.LinkFrame] = []
        calls: dict[Call, None] = {}
        ended: list[int] = []
        size = 0
        while size < max_bytes and (self._urgent or self._credit_due or self._turns):
            if self._urgent:
                frame = self._urgent.popleft()
                ended.append(frame.call_id)
                self._credit_due.pop(frame.call_id, None)
            elif self._credit_due:
                call_id, call = next(iter(self._credit_due.items()))
                del self._credit_due[call_id]
                frame = pb.LinkFrame(call_id=call_id, credit=call.received.take_credit())
            else:
                call = self._turns.popleft()
                frame = self._next_of(call)
                calls[call] = None
                if call.unsent.is_over and not call.is_own:
                    ended.append(call.call_id)
            frames.append(frame)
            size += frame.ByteSize()
            if len(frames) >= MAX_FRAMES_AT_ONCE:
                break
        return frames, calls, ended

    def _next_of(self, call: Call) -> pb.LinkFrame:
        unsent = call.unsent
        before = unsent.unsent_bytes
        frame = unsent.next_frame()
        self.unsent_bytes += unsent.unsent_bytes - before
        call.is_scheduled = unsent.is_sendable
        if call.is_scheduled:
            self._turns.append(call)
        return frame
