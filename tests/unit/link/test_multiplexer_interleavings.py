"""Random histories of a link: whatever happens in whatever order, each call gets its own bytes in order."""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.api.common.v1 import link_pb2 as pb
from weft.link.flow_control import Call
from weft.link.frames import EMPTY_PART_COST, WINDOW_BYTES, Side
from weft.link.multiplexer import CallBegan, CallEnded, LinkLimits, Multiplexer

MAX_MESSAGE_BYTES = 3 * WINDOW_BYTES
SIZES = st.sampled_from([0, 1, 50, 1000, 70_000, WINDOW_BYTES, MAX_MESSAGE_BYTES])
GIVEN_UP = pb.CallEnd(code=1)


@dataclass(eq=False)
class Way:
    """One direction of one call."""

    sender: Multiplexer
    sending: Call
    receiver: Multiplexer
    receiving: Call | None = None
    expected: deque[bytes] = field(default_factory=deque)
    outstanding: int = 0
    is_closed: bool = False
    is_unwanted: bool = False


class LinkHistory(RuleBasedStateMachine):
    @initialize()
    def join(self) -> None:
        limits = LinkLimits(max_message_bytes=MAX_MESSAGE_BYTES)
        self.ends = {side: Multiplexer(side, limits) for side in Side}
        self.wires: dict[Side, deque[pb.LinkFrame]] = {side: deque() for side in Side}
        self.there: dict[int, Way] = {}
        self.back: dict[int, Way] = {}
        self.counter = 0

    @rule(side=st.sampled_from(Side))
    def begin(self, side: Side) -> None:
        if len([way for way in self.there.values() if way.sender is self.ends[side]]) >= 6:
            return
        peer = self.ends[Side(1 - side)]
        call = self.ends[side].begin("/s/m")
        self.there[call.call_id] = Way(self.ends[side], call, peer)

    @precondition(lambda self: self.there or self.back)
    @rule(data=st.data(), size=SIZES)
    def send(self, data: st.DataObject, size: int) -> None:
        way = self._some(data, [way for way in [*self.there.values(), *self.back.values()] if not way.is_closed])
        if way is None or way.sending.status is not None or len(way.expected) > 8 or way.is_unwanted:
            return
        self.counter += 1
        message = (b"%d." % self.counter).ljust(size, b"x")[:size]
        way.sender.send(way.sending, message)
        way.expected.append(message)

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        way = self._some(data, [way for way in [*self.there.values(), *self.back.values()] if way.receiving])
        if way is None or way.receiving is None:
            return
        message = way.receiver.read(way.receiving)
        if message is not None:
            assert message == way.expected.popleft()

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        way = self._some(data, [way for way in self.back.values() if not way.is_closed])
        if way is not None:
            way.is_closed = True
            self._stop_reading(self.there[way.sending.call_id])
            way.sender.end(way.sending, pb.CallEnd(message=f"end of {way.sending.call_id}"))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        way = self._some(data, list(self.there.values()))
        if way is not None:
            way.sender.cancel(way.sending, GIVEN_UP)
            way.sender.release(way.sending)
            self._forget(way.sending.call_id)

    @rule(side=st.sampled_from(Side), max_bytes=st.sampled_from([1, 1000, 100_000, 1_000_000]))
    def write(self, side: Side, max_bytes: int) -> None:
        self.wires[side].extend(self.ends[side].take_frames(max_bytes)[0])

    @rule(side=st.sampled_from(Side), count=st.integers(1, 20))
    def deliver(self, side: Side, count: int) -> None:
        for _ in range(min(count, len(self.wires[side]))):
            self._take(side, self.wires[side].popleft())

    @invariant()
    def memory_is_bounded(self) -> None:
        for end in getattr(self, "ends", {}).values():
            assert end.unread_bytes >= 0
            assert end.unsent_bytes >= 0
            assert end.unread_bytes <= 12 * (MAX_MESSAGE_BYTES + 70 * WINDOW_BYTES)

    def teardown(self) -> None:
        """Nothing may be stuck: with everybody reading, every byte arrives."""
        if not hasattr(self, "ends"):
            return
        while self._drain():
            pass
        assert not [way for way in [*self.there.values(), *self.back.values()] if way.expected]
        for way in list(self.back.values()):
            if way.sending.status is None:
                self._stop_reading(self.there[way.sending.call_id])
                way.sender.end(way.sending, pb.CallEnd(message=f"end of {way.sending.call_id}"))
        while self._drain():
            pass
        for call_id, way in self.there.items():
            assert not way.expected
            assert not self.back[call_id].expected
            assert way.sending.status == pb.CallEnd(message=f"end of {call_id}")
        for end in self.ends.values():
            assert (end.unread_bytes, end.unsent_bytes, end.has_frames) == (0, 0, False)

    def _drain(self) -> bool:
        moved = False
        for side in Side:
            self.wires[side].extend(self.ends[side].take_frames(1 << 40)[0])
            while self.wires[side]:
                moved = True
                self._take(side, self.wires[side].popleft())
        for way in [*self.there.values(), *self.back.values()]:
            while way.receiving is not None and (message := way.receiver.read(way.receiving)) is not None:
                moved = True
                assert message == way.expected.popleft()
        return moved

    def _take(self, side: Side, frame: pb.LinkFrame) -> None:
        own = self.there if frame.call_id % 2 == side else self.back
        other = self.back if own is self.there else self.there
        if frame.HasField("part") and (way := own.get(frame.call_id)) is not None:
            way.outstanding += len(frame.part.data) or EMPTY_PART_COST
            assert way.outstanding <= WINDOW_BYTES, "more than the window was under way"
        if frame.HasField("credit") and (way := other.get(frame.call_id)) is not None:
            way.outstanding -= frame.credit
            assert way.outstanding >= 0, "more was credited than was used up"
        event = self.ends[Side(1 - side)].receive(frame)
        if isinstance(event, CallBegan) and event.call.call_id in self.there:
            self._note_begun(event.call)
        if isinstance(event, CallEnded):
            self.ends[Side(1 - side)].release(event.call)

    def _note_begun(self, call: Call) -> None:
        way = self.there[call.call_id]
        way.receiving = call
        self.back[call.call_id] = Way(way.receiver, call, way.sender, receiving=way.sending)

    def _stop_reading(self, way: Way) -> None:
        """The callee ends the call, whatever the caller has still to say."""
        way.is_unwanted = True
        way.expected.clear()
        assert way.receiving is not None
        way.receiver.release(way.receiving)

    def _forget(self, call_id: int) -> None:
        way = self.there.pop(call_id)
        self.back.pop(call_id, None)
        if way.receiving is not None:
            way.receiver.release(way.receiving)

    def _some(self, data: st.DataObject, ways: list[Way]) -> Way | None:
        return data.draw(st.sampled_from(ways)) if ways else None


TestLinkHistory = LinkHistory.TestCase
TestLinkHistory.settings = settings(stateful_step_count=60)
