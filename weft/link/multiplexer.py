"""The link's protocol without I/O: frames in, events and frames out.

It knows nothing of gRPC, of asyncio, or of what the messages mean.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import MAX_MESSAGE_BYTES
from weft.link.codec import status_of
from weft.link.frames import (
    MAX_CALL_ID,
    MAX_FRAMES_AT_ONCE,
    MAX_PART_BYTES,
    WINDOW_BYTES,
    CallStatus,
    Cancel,
    Credit,
    End,
    Frame,
    HalfClose,
    LinkProtocolError,
    Metadata,
    Part,
    Side,
    Start,
    frame_bytes,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Bounds of one link."""

    max_own_calls: int = 1024
    """Calls begun here that may run at once."""
    max_peer_calls: int = 1024
    """Calls begun by the peer that may run at once."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_unread_bytes: int = 256 * 1024 * 1024
    """Received and not yet read, over all calls."""
    max_unsent_bytes: int = 256 * 1024 * 1024
    """Waiting to be sent, over all calls."""


class Call:
    """One call as one side sees it. Made and changed by the multiplexer alone."""

    def __init__(self, start: Start, send: SendHalf, receive: ReceiveHalf, *, is_own: bool) -> None:
        self.call_id = start.call_id
        self.method = start.method
        self.metadata = start.metadata
        self.timeout_seconds = start.timeout_seconds
        self.is_own = is_own
        self.send = send
        self.receive = receive
        self.is_listed = False
        """Whether it waits for its turn to send."""
        self.peer_is_done = False
        """No more messages will come."""
        self.status: CallStatus | None = None
        """How it ended, once it has; for a call of the peer also that it was cancelled."""


@dataclass(frozen=True, slots=True)
class CallBegan:
    """The peer began a call."""

    call: Call


@dataclass(frozen=True, slots=True)
class CallReadable:
    """A message can be read, or no more will come."""

    call: Call


@dataclass(frozen=True, slots=True)
class CallOver:
    """A call of the peer ended from outside: it was cancelled, or what it sent could not be kept."""

    call: Call


Event = CallBegan | CallReadable | CallOver


class Multiplexer:
    """Many calls over one ordered stream of frames."""

    def __init__(self, side: Side, limits: LinkLimits) -> None:
        self._side = side
        self._limits = limits
        self._calls: dict[int, Call] = {}
        self._next_id = side.value or 2
        self._last_peer_id = 0
        self._own_calls = 0
        self._urgent: deque[Frame] = deque()
        self._credit_due: dict[int, Call] = {}
        self._turns: deque[Call] = deque()
        self._unread_bytes = 0
        self._unsent_bytes = 0

    @property
    def unread_bytes(self) -> int:
        """Received and not yet read, over all calls."""
        return self._unread_bytes

    @property
    def unsent_bytes(self) -> int:
        """Waiting to be sent, over all calls."""
        return self._unsent_bytes

    @property
    def has_frames(self) -> bool:
        """Whether `take_frames` has any."""
        return bool(self._urgent or self._credit_due or self._turns)

    def begin(self, method: str, metadata: Metadata = (), timeout_seconds: float | None = None) -> Call:
        """Begin a call. Raises NO_SLOT_AVAILABLE at the limit of calls, LinkProtocolError when ids have run out."""
        if self._own_calls >= self._limits.max_own_calls:
            raise WeftError(
                Reason.NO_SLOT_AVAILABLE, f"the link carries {self._limits.max_own_calls} calls, which is its limit"
            )
        if self._next_id > MAX_CALL_ID:
            raise LinkProtocolError("no call ids are left")
        start = Start(self._next_id, method, metadata, timeout_seconds, WINDOW_BYTES)
        self._next_id += 2
        call = self._add(start, SendHalf(start.call_id, WINDOW_BYTES, start), is_own=True)
        self._own_calls += 1
        self._list(call)
        return call

    def send(self, call: Call, message: bytes) -> None:
        """Send a message; nothing happens when the call is over.

        Raises REQUEST_TOO_LARGE for one that the peer would refuse, NO_SLOT_AVAILABLE when too much waits already.
        """
        if call.status is not None:
            return
        if len(message) > self._limits.max_message_bytes:
            raise WeftError(
                Reason.REQUEST_TOO_LARGE,
                f"a message on a link may have at most {self._limits.max_message_bytes} bytes",
            )
        if self._unsent_bytes + len(message) > self._limits.max_unsent_bytes:
            raise WeftError(Reason.NO_SLOT_AVAILABLE, "too much waits to be sent over the link")
        before = call.send.unsent_bytes
        call.send.put(message)
        self._unsent_bytes += call.send.unsent_bytes - before
        self._list(call)

    def half_close(self, call: Call) -> None:
        """Send no more messages on an own call."""
        if call.status is None and not call.send.is_closed:
            call.send.close(HalfClose(call.call_id))
            self._list(call)

    def end(self, call: Call, status: CallStatus) -> None:
        """End a call of the peer, after what was sent on it."""
        if call.status is None:
            call.status = status
            call.send.close(End(call.call_id, status))
            self._list(call)

    def cancel(self, call: Call, status: CallStatus) -> None:
        """Give an own call up; `status` is how it ended for us."""
        if call.status is not None:
            return
        self._close(call, status)
        if call.send.is_begun:
            # It counts until the peer can know, or a flood of calls given up would have no bound.
            self._urgent.append(Cancel(call.call_id))
        else:
            self._remove(call)
        self._drop_unsent(call)

    def read(self, call: Call) -> bytes | None:
        """The next message of a call, if one is there."""
        before = call.receive.buffered_bytes
        message = call.receive.read()
        self._unread_bytes += call.receive.buffered_bytes - before
        self._note_credit(call)
        return message

    def release(self, call: Call) -> None:
        """Forget what a call received; nobody will read it."""
        self._unread_bytes -= call.receive.buffered_bytes
        call.receive.clear()

    def lose(self, status: CallStatus) -> list[Call]:
        """The stream is gone: every call ends. Returns the calls that had not ended yet."""
        lost = [call for call in self._calls.values() if call.status is None]
        for call in lost:
            self._close(call, status)
            self._drop_unsent(call)
        self._calls.clear()
        self._urgent.clear()
        self._credit_due.clear()
        self._turns.clear()
        return lost

    def receive(self, frame: Frame) -> list[Event]:
        """Take a frame from the peer. Raises LinkProtocolError when it must not have been sent."""
        return list(self._receive(frame))

    def take_frames(self, max_bytes: int) -> tuple[list[Frame], list[Call]]:
        """Frames to send now, about `max_bytes` of them, and the calls they are of."""
        frames: list[Frame] = []
        sent: dict[int, Call] = {}
        size = 0
        while size < max_bytes and len(frames) < MAX_FRAMES_AT_ONCE:
            if self._urgent or self._credit_due:
                frames.append(self._next_urgent())
            elif self._turns:
                call = self._turns.popleft()
                frames.append(self._next_of(call))
                sent[call.call_id] = call
            else:
                break
            size += frame_bytes(frames[-1])
        return frames, list(sent.values())

    def _receive(self, frame: Frame) -> Iterator[Event]:
        if isinstance(frame, Start):
            yield self._began(frame)
            return
        call = self._calls.get(frame.call_id)
        if call is None:
            self._require_old(frame.call_id)
            return
        match frame:
            case Part():
                yield from self._take_part(call, frame)
            case HalfClose():
                yield self._half_closed(call)
            case End():
                yield self._ended(call, frame.status)
            case Cancel():
                yield from self._cancelled(call)
            case Credit():
                call.send.add_credit(frame.byte_count)
                self._list(call)

    def _next_urgent(self) -> Frame:
        if self._urgent:
            frame = self._urgent.popleft()
            if isinstance(frame, Cancel):
                self._remove(self._calls[frame.call_id])
            return frame
        call_id, call = next(iter(self._credit_due.items()))
        del self._credit_due[call_id]
        return Credit(call_id, call.receive.take_credit())

    def _next_of(self, call: Call) -> Frame:
        before = call.send.unsent_bytes
        frame = call.send.next_frame()
        self._unsent_bytes += call.send.unsent_bytes - before
        if isinstance(frame, End):
            self._remove(call)
        call.is_listed = call.send.is_sendable
        if call.is_listed:
            self._turns.append(call)
        return frame

    def _began(self, start: Start) -> Event:
        if start.call_id % 2 == self._side or start.call_id <= self._last_peer_id:
            raise LinkProtocolError(f"{start.call_id} cannot be the id of a new call")
        if len(self._calls) - self._own_calls >= self._limits.max_peer_calls:
            raise LinkProtocolError(f"more than {self._limits.max_peer_calls} calls at once")
        self._last_peer_id = start.call_id
        return CallBegan(self._add(start, SendHalf(start.call_id, start.initial_credit), is_own=False))

    def _take_part(self, call: Call, part: Part) -> Iterator[Event]:
        if call.peer_is_done:
            if call.status is None:
                raise LinkProtocolError(f"call {call.call_id} sent a message after its last word")
            return
        before = call.receive.buffered_bytes
        try:
            call.receive.take(part)
        except LinkProtocolError:
            raise
        except WeftError as error:
            yield self._fail(call, error)
            return
        self._unread_bytes += call.receive.buffered_bytes - before
        if self._unread_bytes > self._limits.max_unread_bytes:
            yield self._fail(call, WeftError(Reason.NO_SLOT_AVAILABLE, "too much that came over the link is unread"))
            return
        self._note_credit(call)
        if not part.more:
            yield CallReadable(call)

    def _fail(self, call: Call, error: WeftError) -> Event:
        """What a call sent cannot be kept: it ends, the link goes on."""
        self.release(call)
        if call.is_own:
            self.cancel(call, status_of(error))
            return CallReadable(call)
        self._drop_unsent(call)
        status = status_of(error)
        self._close(call, status)
        self._urgent.append(End(call.call_id, status))
        self._remove(call)
        return CallOver(call)

    def _half_closed(self, call: Call) -> Event:
        if call.is_own or (call.peer_is_done and call.status is None):
            raise LinkProtocolError(f"call {call.call_id} half-closed out of turn")
        call.peer_is_done = True
        return CallReadable(call)

    def _ended(self, call: Call, status: CallStatus) -> Event:
        if not call.is_own:
            raise LinkProtocolError(f"call {call.call_id} ended by its caller")
        if call.status is None:
            self._close(call, status)
            self._drop_unsent(call)
            self._remove(call)
        return CallReadable(call)

    def _cancelled(self, call: Call) -> Iterator[Event]:
        if call.is_own:
            raise LinkProtocolError(f"call {call.call_id} cancelled by its callee")
        was_over = call.status is not None
        self._close(call, status_of(WeftError(Reason.CANCELLED, "the caller gave up")))
        self._drop_unsent(call)
        self._remove(call)
        if not was_over:
            yield CallOver(call)

    def _close(self, call: Call, status: CallStatus) -> None:
        call.status = call.status or status
        call.peer_is_done = True

    def _add(self, start: Start, send: SendHalf, *, is_own: bool) -> Call:
        call = Call(start, send, ReceiveHalf(self._limits.max_message_bytes), is_own=is_own)
        self._calls[call.call_id] = call
        return call

    def _remove(self, call: Call) -> None:
        if self._calls.pop(call.call_id, None) is not None and call.is_own:
            self._own_calls -= 1
        self._credit_due.pop(call.call_id, None)

    def _drop_unsent(self, call: Call) -> None:
        self._unsent_bytes -= call.send.unsent_bytes
        call.send.clear()
        if call.is_listed:
            call.is_listed = False
            self._turns.remove(call)

    def _list(self, call: Call) -> None:
        if not call.is_listed and call.send.is_sendable:
            call.is_listed = True
            self._turns.append(call)

    def _note_credit(self, call: Call) -> None:
        if call.receive.credit_is_due and call.call_id in self._calls and not call.peer_is_done:
            self._credit_due[call.call_id] = call

    def _require_old(self, call_id: int) -> None:
        """A late frame of a call that is over is nothing; one of a call that never was is a violation."""
        last = self._next_id - 2 if call_id % 2 == self._side else self._last_peer_id
        if not 0 < call_id <= last:
            raise LinkProtocolError(f"there is no call {call_id}")
