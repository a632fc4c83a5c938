"""The check of frames that a peer sent, and what of a call's metadata a link carries."""

from typing import Any

import grpc
import pytest
from link_frames import cancel, credit, end, half_close, part, start

from weft.api.common.v1 import link_pb2 as pb
from weft.api.router.v1 import relay_service_pb2
from weft.link.frames import (
    MAX_FRAMES_AT_ONCE,
    MAX_PART_BYTES,
    MAX_STATUS_MESSAGE_CHARS,
    LinkProtocolError,
    Side,
    check_frame,
    forwardable,
    metadata_of,
    new_status,
)
from weft.link.link import Link
from weft.link.multiplexer import LinkLimits

STATUS = new_status(14, "gone", (("grpc-status-details-bin", b"\x00\xff"),))


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (start(2, "/p.S/M", (("traceparent", "00-1"), ("x-bin", b"\xff\x00")), 1.5), "start"),
        (start(2, "/p.S/M"), "start"),
        (part(2, b"\x00" * MAX_PART_BYTES, more=True), "part"),
        (part(2, b""), "part"),
        (half_close(4), "half_close"),
        (end(6, STATUS), "end"),
        (end(6, pb.CallEnd()), "end"),
        (cancel(1), "cancel"),
        (credit(3, 2**31), "credit"),
    ],
)
def test_frame_round_trips(frame: pb.LinkFrame, kind: str) -> None:
    sent = relay_service_pb2.AttachRequest(frames=[frame]).SerializeToString()
    (found,) = relay_service_pb2.AttachRequest.FromString(sent).frames
    assert check_frame(found) == kind
    assert found == frame


def test_oversized_status_message_is_truncated() -> None:
    frame = end(2, pb.CallEnd(code=14, message="x" * 100_000))
    check_frame(frame)
    assert frame.end.message == "x" * MAX_STATUS_MESSAGE_CHARS
    assert new_status(14, "x" * 100_000, ()).message == "x" * MAX_STATUS_MESSAGE_CHARS


def _start(**changes: object) -> pb.LinkFrame:
    return pb.LinkFrame(call_id=2, start=pb.CallStart(**{"method": "/p.S/M", **changes}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message",
    [
        pb.LinkFrame(call_id=2),
        pb.LinkFrame(call_id=2, part=pb.MessagePart(data=b"x" * (MAX_PART_BYTES + 1))),
        _start(method=""),
        _start(method="/p.S/M/../../x"),
        _start(method="/p.S/" + "M" * 300),
        _start(metadata=[pb.CallMetadata(key="Upper", value=b"x")]),
        _start(metadata=[pb.CallMetadata(key="x\r\ny", value=b"x")]),
        _start(metadata=[pb.CallMetadata(key="x", value=b"a\r\nb: c")]),
        _start(metadata=[pb.CallMetadata(key="x", value="ü".encode())]),
        _start(metadata=[pb.CallMetadata(key="x", value=b"x" * 40_000)]),
    ],
)
def test_invalid_frame_ends_the_link(message: pb.LinkFrame) -> None:
    with pytest.raises(LinkProtocolError):
        check_frame(message)


def test_transport_metadata_is_not_forwarded() -> None:
    given = (
        ("user-agent", "grpc-python"),
        ("grpc-timeout", "1S"),
        ("grpc-status", "0"),
        (":path", "/x"),
        ("grpc-status-details-bin", b"x"),
        ("x-request-id", "r1"),
    )
    assert forwardable(given) == (("grpc-status-details-bin", b"x"), ("x-request-id", "r1"))
    assert forwardable(None) == ()


@pytest.mark.parametrize(
    "entry", [("x", "ü"), ("x", "a\nb"), ("Upper", "x"), ("x\n", "x"), ("x-bin", "x"), ("x", b"x")]
)
def test_metadata_that_violates_the_link_protocol_is_not_forwarded(entry: tuple[str, str | bytes]) -> None:
    given = forwardable((entry, ("x-request-id", "r1")))
    assert given == (("x-request-id", "r1"),)
    frame = start(2, "/p.S/M", given)
    assert check_frame(frame) == "start"
    assert metadata_of(frame.start.metadata) == given


class OneMessage:
    """A stream that gives one message."""

    def __init__(self, *frames: pb.LinkFrame) -> None:
        self._messages: list[Any] = [relay_service_pb2.AttachResponse(frames=frames), grpc.aio.EOF]

    async def read(self) -> Any:
        return self._messages.pop(0)

    async def write(self, message: Any) -> None:
        pass


async def test_too_many_frames_in_one_message_are_refused_before_parsing() -> None:
    async def answer(_: object) -> pb.CallEnd:
        raise AssertionError("there is no call")

    link = Link(Side.RUNNER, LinkLimits(), answer)
    call = link.call("/p.S/M")
    link.mux.take_frames(1)
    await link.run(OneMessage(*[credit(1, 1)] * MAX_FRAMES_AT_ONCE), relay_service_pb2.AttachRequest)
    assert call.status is not None
    with pytest.raises(LinkProtocolError, match="in one message"):
        await link.run(OneMessage(*[pb.LinkFrame()] * (MAX_FRAMES_AT_ONCE + 1)), relay_service_pb2.AttachRequest)
