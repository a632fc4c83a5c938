"""The link protocol without I/O: frames in, events and frames out. Independent of asyncio and message contents."""

from collections.abc import Callable
from dataclasses import dataclass

from weft.api.common.v1 import link_pb2 as pb
from weft.kernel.channels.rpc import MAX_MESSAGE_BYTES
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.fast_dataclass import fast_dataclass
from weft.link.flow_control import CREDIT_STEP_BYTES, Call, ReceiveHalf, SendHalf, SendSchedule
from weft.link.frames import (
    GAVE_UP,
    WINDOW_BYTES,
    LinkProtocolError,
    Metadata,
    Side,
    check_frame,
    new_start,
    status_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Bounds of one link."""

    max_own_calls: int = 1024
    """Concurrent calls begun by this side."""
    max_peer_calls: int = 1024
    """Concurrent calls begun by the peer."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_unread_bytes: int = 256 * 1024 * 1024
    """Received but unread bytes, over all calls."""
    max_unsent_bytes: int = 256 * 1024 * 1024
    """Unsent bytes, over all calls."""


class UnreadShare:
    """Limits the unread bytes of all links of a process together.

    Over the limit, only links with less than an even part of it may receive more.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_link: dict[object, int] = {}
        self.total = 0

    def note(self, link: object, unread: int) -> None:
        """Sets the unread bytes of a link; 0 removes the link."""
        self.total += unread - self._by_link.pop(link, 0)
        if unread:
            self._by_link[link] = unread

    def is_exceeded_by(self, link: object) -> bool:
        """Whether all links together exceed the limit, and this one holds at least its even part of it."""
        is_over = self.total > self._max_bytes
        return is_over and self._by_link.get(link, 0) * len(self._by_link) >= self._max_bytes


@fast_dataclass()
class CallBegan:
    """The peer has begun a call."""

    call: Call


@fast_dataclass()
class CallReadable:
    """A message can be read, or no more will arrive."""

    call: Call


@fast_dataclass()
class CallEnded:
    """A call of the peer ended early: it was cancelled, or its messages exceeded a limit."""

    call: Call


Event = CallBegan | CallReadable | CallEnded


class Multiplexer:
    """Multiplexes many calls over one ordered stream of frames."""

    def __init__(
        self,
        side: Side,
        limits: LinkLimits,
        note_work: Callable[[], None] = lambda: None,
        share: UnreadShare | None = None,
        new_call: Callable[..., Call] = Call,
    ) -> None:
        """`note_work` is called whenever there is a frame to send; `share` counts unread bytes with other links.

        `new_call` returns a call, as `Call` does.
        """
        self._share = share
        self._new_call = new_call
        self._side = side
        self._limits = limits
        self._calls: dict[int, Call] = {}
        self._next_id = side.value or 2
        self._last_peer_id = 0
        self._own_calls = 0
        self._schedule = SendSchedule(note_work)
        self._unread_bytes = 0

    @property
    def unread_bytes(self) -> int:
        """Bytes received and not yet read, over all calls."""
        return self._unread_bytes

    @property
    def unsent_bytes(self) -> int:
        """Bytes waiting to be sent, over all calls."""
        return self._schedule.unsent_bytes

    @property
    def has_frames(self) -> bool:
        """Whether `take_frames` would return any."""
        return bool(self._schedule)

    def begin(self, method: str, metadata: Metadata = (), timeout_seconds: float | None = None) -> Call:
        """Begins a call. Raises NO_SLOT_AVAILABLE at the limit of calls."""
        if self._own_calls >= self._limits.max_own_calls:
            raise WeftError(
                Reason.NO_SLOT_AVAILABLE, f"the link carries {self._limits.max_own_calls} calls, which is its limit"
            )
        call_id, start = self._next_id, new_start(method, metadata, timeout_seconds)
        self._next_id += 2
        call = self._add(call_id, start, SendHalf(call_id, WINDOW_BYTES, start), is_own=True)
        self._own_calls += 1
        self._schedule.add(call)
        return call

    def send(self, call: Call, message: bytes) -> None:
        """Sends a message; does nothing if the call has ended.

        Raises REQUEST_TOO_LARGE if the peer would reject it, NO_SLOT_AVAILABLE if too many bytes are unsent.
        """
        if call.status is not None:
            return
        if len(message) > self._limits.max_message_bytes:
            raise WeftError(
                Reason.REQUEST_TOO_LARGE,
                f"a message on a link may have at most {self._limits.max_message_bytes} bytes",
            )
        if self._schedule.unsent_bytes + len(message) > self._limits.max_unsent_bytes:
            raise WeftError(Reason.NO_SLOT_AVAILABLE, "too much waits to be sent over the link")
        self._schedule.put(call, message)

    def end(self, call: Call, status: pb.CallEnd) -> None:
        """Ends a call of the peer, after its unsent messages."""
        if call.status is None:
            call.status = status
            call.unsent.close(pb.LinkFrame(call_id=call.call_id, end=status))
            self._schedule.add(call)

    def cancel(self, call: Call, status: pb.CallEnd) -> None:
        """Cancels an own call; `status` is its status on this side."""
        if call.status is not None:
            return
        call.finish(status)
        if call.unsent.is_begun:
            # The call counts until its cancellation is sent, so that the number of cancelled calls is bounded.
            self._schedule.put_urgent(pb.LinkFrame(call_id=call.call_id, cancel=pb.CallCancel()))
        else:
            self._remove(call.call_id)
        self._schedule.drop_unsent(call)

    def read(self, call: Call) -> bytes | None:
        """Returns the next message of a call; None if there is none yet."""
        received = call.received
        if not received.buffered_bytes:
            return None
        before = received.buffered_bytes
        message = received.read()
        self._unread_bytes += received.buffered_bytes - before
        if self._share is not None:
            self._share.note(self, self._unread_bytes)
        if received.owed_bytes >= CREDIT_STEP_BYTES:
            self._note_credit(call)
        return message

    def release(self, call: Call) -> None:
        """Drops the unread messages of a call."""
        self._unread_bytes -= call.received.buffered_bytes
        if self._share is not None:
            self._share.note(self, self._unread_bytes)
        call.received.clear()

    def lose(self, status: pb.CallEnd) -> list[Call]:
        """Ends all calls, because the stream is lost. Returns those that had not ended yet."""
        lost = [call for call in self._calls.values() if call.status is None]
        for call in lost:
            call.finish(status)
            self._schedule.drop_unsent(call)
        self._calls.clear()
        self._schedule.clear()
        if self._share is not None:
            self._share.note(self, 0)
            self._share = None
        return lost

    def receive(self, frame: pb.LinkFrame) -> Event | None:
        """Processes a received frame. Raises LinkProtocolError if it violates the protocol."""
        kind = check_frame(frame)
        if kind == "start":
            return self._began(frame.call_id, frame.start)
        call = self._calls.get(frame.call_id)
        if call is None:
            self._require_old(frame.call_id)
            return None
        event: Event | None = None
        match kind:
            case "part":
                event = self._take_part(call, frame.part)
            case "half_close":
                event = self._half_closed(call)
            case "end":
                event = self._ended(call, frame.end)
            case "cancel":
                event = self._cancelled(call)
            case _:
                call.unsent.add_credit(frame.credit)
                self._schedule.add(call)
        return event

    def take_frames(self, max_bytes: int) -> tuple[list[pb.LinkFrame], list[Call]]:
        """Returns frames to send now, about `max_bytes` together, and the calls that they belong to."""
        frames, calls, ended = self._schedule.take(max_bytes)
        for call_id in ended:
            self._remove(call_id)
        return frames, list(calls)

    def _began(self, call_id: int, start: pb.CallStart) -> Event:
        if call_id % 2 == self._side or call_id <= self._last_peer_id:
            raise LinkProtocolError(f"{call_id} cannot be the id of a new call")
        if len(self._calls) - self._own_calls >= self._limits.max_peer_calls:
            raise LinkProtocolError(f"more than {self._limits.max_peer_calls} concurrent calls")
        self._last_peer_id = call_id
        return CallBegan(self._add(call_id, start, SendHalf(call_id, start.initial_credit), is_own=False))

    def _take_part(self, call: Call, part: pb.MessagePart) -> Event | None:
        if call.peer_is_done:
            if call.status is None:
                raise LinkProtocolError(f"call {call.call_id} sent a message after its closing frame")
            return None
        before = call.received.buffered_bytes
        try:
            call.received.take(part.data, more=part.more)
        except LinkProtocolError:
            raise
        except WeftError as error:
            return self._fail(call, error)
        self._unread_bytes += call.received.buffered_bytes - before
        if self._share is not None:
            self._share.note(self, self._unread_bytes)
        is_over = self._share is not None and self._share.is_exceeded_by(self)
        if is_over or self._unread_bytes > self._limits.max_unread_bytes:
            return self._fail(call, WeftError(Reason.NO_SLOT_AVAILABLE, "too much that came over the link is unread"))
        if call.received.owed_bytes >= CREDIT_STEP_BYTES:
            self._note_credit(call)
        return None if part.more else CallReadable(call)

    def _fail(self, call: Call, error: WeftError) -> Event:
        """Ends a call that exceeded a limit; the link continues."""
        self.release(call)
        if call.is_own:
            self.cancel(call, status_of(error))
            return CallReadable(call)
        self._schedule.drop_unsent(call)
        status = status_of(error)
        call.finish(status)
        self._schedule.put_urgent(pb.LinkFrame(call_id=call.call_id, end=status))
        self._remove(call.call_id)
        return CallEnded(call)

    def _half_closed(self, call: Call) -> Event:
        if call.is_own or (call.peer_is_done and call.status is None):
            raise LinkProtocolError(f"call {call.call_id} half-closed out of turn")
        call.peer_is_done = True
        return CallReadable(call)

    def _ended(self, call: Call, status: pb.CallEnd) -> Event:
        if not call.is_own:
            raise LinkProtocolError(f"call {call.call_id} ended by its caller")
        if call.status is None:
            call.is_answered = True
            call.finish(status)
            if call.unsent.unsent_bytes or call.is_scheduled:
                self._schedule.drop_unsent(call)
            self._remove(call.call_id)
        return CallReadable(call)

    def _cancelled(self, call: Call) -> Event | None:
        if call.is_own:
            raise LinkProtocolError(f"call {call.call_id} cancelled by its callee")
        had_ended = call.status is not None
        call.finish(GAVE_UP)
        self._schedule.drop_unsent(call)
        self._remove(call.call_id)
        return None if had_ended else CallEnded(call)

    def _add(self, call_id: int, start: pb.CallStart, unsent: SendHalf, *, is_own: bool) -> Call:
        received = ReceiveHalf(self._limits.max_message_bytes)
        call = self._calls[call_id] = self._new_call(call_id, start, unsent, received, is_own=is_own)
        return call

    def _remove(self, call_id: int) -> None:
        call = self._calls.pop(call_id, None)
        if call is not None:
            self._own_calls -= call.is_own
            if call.received.owed_bytes >= CREDIT_STEP_BYTES:
                self._schedule.drop_credit(call)

    def _note_credit(self, call: Call) -> None:
        if call.call_id in self._calls and not call.peer_is_done:
            self._schedule.add_credit(call)

    def _require_old(self, call_id: int) -> None:
        """Accepts a late frame of an ended call. Raises LinkProtocolError if the call never existed."""
        last = self._next_id - 2 if call_id % 2 == self._side else self._last_peer_id
        if not 0 < call_id <= last:
            raise LinkProtocolError(f"there is no call {call_id}")
