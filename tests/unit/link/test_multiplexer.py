from collections.abc import Iterable
from itertools import repeat

import pytest
from link_frames import cancel, credit, end, half_close, part, start

from weft.api.common.v1 import link_pb2 as pb
from weft.api.router.v1 import relay_service_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.link import flow_control
from weft.link.flow_control import Call
from weft.link.frames import (
    MAX_FRAMES_AT_ONCE,
    MAX_PART_BYTES,
    WINDOW_BYTES,
    LinkProtocolError,
    Side,
    metadata_of,
    new_status,
    timeout_of,
)
from weft.link.link import MAX_BATCH_BYTES, MAX_LINK_MESSAGE_BYTES
from weft.link.multiplexer import CallBegan, CallEnded, CallReadable, Event, LinkLimits, Multiplexer, UnreadShare

METHOD = "/pkg.Service/Method"
EVERYTHING = 1 << 40
OK = new_status(0, "fine", (("x", "y"),))
GIVEN_UP = pb.CallEnd(code=1)


class Pair:
    """A router's and a runner's end, joined by hand."""

    def __init__(
        self, *, router: LinkLimits | None = None, runner: LinkLimits | None = None, share: UnreadShare | None = None
    ) -> None:
        self.router = Multiplexer(Side.ROUTER, router or LinkLimits(), share=share)
        self.runner = Multiplexer(Side.RUNNER, runner or LinkLimits())

    def to_runner(self) -> list[Event]:
        return _carry(self.router, self.runner)

    def to_router(self) -> list[Event]:
        return _carry(self.runner, self.router)

    def settle(self) -> None:
        while self.router.has_frames or self.runner.has_frames:
            self.to_runner()
            self.to_router()

    def begun(self) -> tuple[Call, Call]:
        """A call of the router as both ends see it."""
        call = self.router.begin(METHOD)
        (event,) = self.to_runner()
        assert isinstance(event, CallBegan)
        return call, event.call


def _carry(sender: Multiplexer, receiver: Multiplexer) -> list[Event]:
    events = [receiver.receive(frame) for frame in _frames(sender)]
    return [event for event in events if event is not None]


def _frames(mux: Multiplexer) -> list[pb.LinkFrame]:
    return mux.take_frames(EVERYTHING)[0]


def test_call_round_trips_over_the_link() -> None:
    pair = Pair()
    call = pair.router.begin(METHOD, (("a", "b"),), timeout_seconds=3.0)
    pair.router.send(call, b"question")
    began, *_ = pair.to_runner()
    assert isinstance(began, CallBegan)
    peer = began.call
    assert (peer.start.method, metadata_of(peer.start.metadata), timeout_of(peer.start)) == (METHOD, (("a", "b"),), 3.0)
    assert pair.runner.read(peer) == b"question"
    pair.runner.receive(half_close(call.call_id))
    assert peer.peer_is_done
    pair.runner.send(peer, b"answer")
    pair.runner.end(peer, OK)
    pair.to_router()
    assert pair.router.read(call) == b"answer"
    assert call.status == OK
    assert pair.router.read(call) is None


def test_message_of_twenty_mebibytes_is_split_and_reassembled() -> None:
    pair = Pair()
    call, peer = pair.begun()
    message = bytes(range(256)) * (20 * 4096)
    pair.router.send(call, message)
    parts = [frame.part for frame in _handed_over(pair) if frame.HasField("part")]
    assert parts
    assert all(len(part.data) <= MAX_PART_BYTES for part in parts)
    pair.settle()
    assert pair.runner.read(peer) == message
    assert pair.router.unsent_bytes == pair.runner.unread_bytes == 0


def _handed_over(pair: Pair) -> list[pb.LinkFrame]:
    """What the router's end has to send now, given to the runner's."""
    frames = _frames(pair.router)
    _receive_all(pair.runner, frames)
    return frames


def _receive_all(mux: Multiplexer, frames: Iterable[pb.LinkFrame]) -> None:
    for frame in frames:
        mux.receive(frame)


def test_stalled_reader_gets_no_second_large_message() -> None:
    pair = Pair()
    call, peer = pair.begun()
    large = b"x" * (10 * WINDOW_BYTES)
    pair.router.send(call, large)
    pair.router.send(call, large)
    pair.settle()
    assert pair.runner.unread_bytes < len(large) + 2 * WINDOW_BYTES
    assert pair.runner.read(peer) == large
    pair.settle()
    assert pair.runner.read(peer) == large


def test_stalled_call_does_not_block_others() -> None:
    pair = Pair()
    stalled, _ = pair.begun()
    lively, lively_peer = pair.begun()
    pair.router.send(stalled, b"x" * (10 * WINDOW_BYTES))
    pair.router.send(stalled, b"x" * (10 * WINDOW_BYTES))
    pair.settle()
    for number in range(100):
        pair.router.send(lively, b"token %d" % number)
        pair.settle()
        assert pair.runner.read(lively_peer) == b"token %d" % number


def test_calls_are_sent_round_robin() -> None:
    pair = Pair()
    calls = [pair.begun()[0] for _ in range(3)]
    for call in calls:
        pair.router.send(call, b"x" * WINDOW_BYTES)
    ids = [frame.call_id for frame in _frames(pair.router)]
    assert ids == [call.call_id for call in calls] * (WINDOW_BYTES // MAX_PART_BYTES)


def test_batch_is_about_the_requested_size() -> None:
    pair = Pair()
    call, _ = pair.begun()
    pair.router.send(call, b"x" * WINDOW_BYTES)
    frames, calls = pair.router.take_frames(2 * MAX_PART_BYTES)
    assert len(frames) == 2
    assert calls == [call]


def test_credit_is_granted_in_steps_and_not_per_message() -> None:
    pair = Pair()
    call, peer = pair.begun()
    for _ in range(1000):
        pair.router.send(call, b"x" * 100)
    pair.to_runner()
    while pair.runner.read(peer) is not None:
        pass
    assert [frame.WhichOneof("kind") for frame in _frames(pair.runner)] == ["credit"]


def test_cancelled_call_ends_on_both_sides() -> None:
    pair = Pair()
    call, peer = pair.begun()
    pair.router.send(call, b"x" * (10 * WINDOW_BYTES))
    pair.router.cancel(call, GIVEN_UP)
    (event,) = pair.to_runner()
    assert event == CallEnded(peer)
    assert peer.status is not None
    assert call.status == GIVEN_UP
    pair.runner.send(peer, b"too late")
    pair.runner.end(peer, OK)
    assert not pair.runner.has_frames
    assert pair.router.unsent_bytes == 0


def test_call_cancelled_before_it_was_sent_is_never_sent() -> None:
    pair = Pair()
    call = pair.router.begin(METHOD)
    pair.router.cancel(call, GIVEN_UP)
    assert _frames(pair.router) == []


def test_cancelled_calls_count_until_the_peer_can_know() -> None:
    pair = Pair(router=LinkLimits(max_own_calls=1))
    call, _ = pair.begun()
    pair.router.cancel(call, GIVEN_UP)
    with pytest.raises(WeftError) as caught:
        pair.router.begin(METHOD)
    assert caught.value.reason is Reason.NO_SLOT_AVAILABLE
    pair.settle()
    pair.router.begin(METHOD)


def test_frames_of_an_ended_call_are_ignored() -> None:
    pair = Pair()
    call, peer = pair.begun()
    pair.runner.end(peer, OK)
    pair.to_router()
    for late in (part(call.call_id, b"x"), credit(call.call_id, 1), cancel(call.call_id)):
        assert pair.runner.receive(late) is None
    assert pair.router.receive(part(call.call_id, b"x")) is None


def test_stream_loss_ends_every_call() -> None:
    pair = Pair()
    calls = [pair.begun()[0] for _ in range(3)]
    lost = pb.CallEnd(code=14)
    assert pair.router.lose(lost) == calls
    assert [call.status for call in calls] == [lost] * 3
    assert not pair.router.has_frames


def test_oversized_message_ends_its_call_and_not_the_link() -> None:
    pair = Pair(runner=LinkLimits(max_message_bytes=1000))
    call, peer = pair.begun()
    pair.router.send(call, b"x" * 1001)
    (event,) = pair.to_runner()
    assert event == CallEnded(peer)
    assert pair.to_router() == [CallReadable(call)]
    assert call.status is not None
    assert "1000 bytes" in call.status.message
    other, other_peer = pair.begun()
    pair.router.send(other, b"small")
    pair.settle()
    assert pair.runner.read(other_peer) == b"small"


def test_message_that_the_peer_would_refuse_is_not_sent() -> None:
    pair = Pair(router=LinkLimits(max_message_bytes=1000))
    call, _ = pair.begun()
    with pytest.raises(WeftError) as caught:
        pair.router.send(call, b"x" * 1001)
    assert caught.value.reason is Reason.REQUEST_TOO_LARGE


def test_unread_bytes_are_bounded_over_all_calls() -> None:
    pair = Pair(runner=LinkLimits(max_unread_bytes=100_000))
    calls = [pair.begun()[0] for _ in range(4)]
    for call in calls:
        pair.router.send(call, b"x" * 40_000)
    pair.settle()
    assert pair.runner.unread_bytes <= 100_000
    refused = [call.status for call in calls if call.status is not None]
    assert [status.code for status in refused] == [8, 8]


def test_unread_bytes_are_bounded_over_all_links_and_the_link_that_holds_most_gives_way() -> None:
    share = UnreadShare(100_000)
    greedy, modest = Pair(share=share), Pair(share=share)

    def answered(pair: Pair, size: int) -> tuple[Call, Call]:
        call, peer = pair.begun()
        pair.runner.send(peer, b"x" * size)
        pair.settle()
        return call, peer

    first, _ = answered(greedy, 60_000)
    second, _ = answered(greedy, 60_000)
    assert (first.status, second.status is not None and second.status.code) == (None, 8)
    assert 60_000 <= share.total < 61_000
    small, _ = answered(modest, 45_000)
    assert (small.status, share.total > 100_000) == (None, True), "its link is within its share"
    late, _ = answered(greedy, 10_000)
    assert late.status is not None
    assert greedy.router.read(first) == b"x" * 60_000
    assert 45_000 <= share.total < 46_000
    modest.router.lose(GIVEN_UP)
    assert share.total == 0
    assert modest.router.read(small) == b"x" * 45_000
    assert share.total == 0


def test_unsent_bytes_are_bounded_over_all_calls() -> None:
    pair = Pair(router=LinkLimits(max_unsent_bytes=100_000))
    call, _ = pair.begun()
    other, _ = pair.begun()
    pair.router.send(call, b"x" * 90_000)
    with pytest.raises(WeftError) as caught:
        pair.router.send(other, b"x" * 20_000)
    assert caught.value.reason is Reason.NO_SLOT_AVAILABLE


def test_released_call_drops_unread_and_later_messages() -> None:
    pair = Pair()
    call, peer = pair.begun()
    pair.router.send(call, b"x" * 1000)
    pair.settle()
    pair.runner.release(peer)
    assert pair.runner.unread_bytes == 0
    pair.router.send(call, b"x" * 1000)
    pair.settle()
    assert pair.runner.unread_bytes == 0
    assert pair.runner.read(peer) is None


def _over_window(call_id: int) -> list[pb.LinkFrame]:
    return [part(call_id, b"x" * MAX_PART_BYTES, more=False)] * (WINDOW_BYTES // MAX_PART_BYTES + 1)


@pytest.mark.parametrize(
    "frames",
    [
        [start(3, METHOD)],
        [start(0, METHOD)],
        [start(2, METHOD), start(2, METHOD)],
        [start(4, METHOD), start(2, METHOD)],
        [part(2, b"")],
        [credit(1, 5)],
        [end(2, OK)],
        [start(2, METHOD), end(2, OK)],
        [start(2, METHOD), half_close(2), half_close(2)],
        [start(2, METHOD), half_close(2), part(2, b"x")],
        [start(2, METHOD), credit(2, 0)],
        [start(2, METHOD), credit(2, 2**31), credit(2, 2**31)],
        [start(2, METHOD), *_over_window(2)],
        [start(number, METHOD) for number in range(2, 2052, 2)],
    ],
)
def test_peer_that_violates_the_protocol_ends_the_link(frames: list[pb.LinkFrame]) -> None:
    runner = Multiplexer(Side.RUNNER, LinkLimits(max_peer_calls=1024))
    with pytest.raises(LinkProtocolError):
        _receive_all(runner, frames)


def test_empty_messages_use_credit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_control, "WINDOW_BYTES", 1_000)
    runner = Multiplexer(Side.RUNNER, LinkLimits())
    runner.receive(start(2, METHOD))
    with pytest.raises(LinkProtocolError):
        _receive_all(runner, repeat(part(2, b""), 1_001))


@pytest.mark.parametrize("frame", [half_close(1), cancel(1)], ids=["half_close", "cancel"])
def test_callee_cannot_send_caller_frames(frame: pb.LinkFrame) -> None:
    runner = Multiplexer(Side.RUNNER, LinkLimits())
    runner.begin(METHOD)
    _frames(runner)
    with pytest.raises(LinkProtocolError):
        runner.receive(frame)


def test_batched_frames_fit_into_one_transport_message() -> None:
    """Calls that fail all at once end with long words, and their ends must not be too much for the stream."""
    limits = LinkLimits(max_own_calls=1024, max_peer_calls=1024)
    pair = Pair(router=limits, runner=limits)
    words = new_status(14, "x" * 4000, (("x-bin", b"y" * 4000),))
    for _ in range(1000):
        pair.router.begin(METHOD, (("x", "z" * 2000),))
    largest = 0
    begun: list[Call] = []
    while pair.router.has_frames:
        frames, _ = pair.router.take_frames(MAX_BATCH_BYTES)
        largest = max(largest, relay_service_pb2.AttachResponse(frames=frames).ByteSize())
        events = [pair.runner.receive(frame) for frame in frames]
        begun += [event.call for event in events if isinstance(event, CallBegan)]
    for call in begun:
        pair.runner.end(call, words)
    ends = 0
    while pair.runner.has_frames:
        frames, _ = pair.runner.take_frames(MAX_BATCH_BYTES)
        largest = max(largest, relay_service_pb2.AttachRequest(frames=frames).ByteSize())
        ends += len(frames)
    assert ends == 1000
    assert largest < MAX_LINK_MESSAGE_BYTES


def test_frame_count_per_message_is_within_the_peer_limit() -> None:
    many = LinkLimits(max_own_calls=20_000)
    mux = Multiplexer(Side.ROUTER, many)
    for _ in range(10_000):
        mux.begin("/p.S/M")
    frames, _ = mux.take_frames(EVERYTHING)
    assert len(frames) == MAX_FRAMES_AT_ONCE
