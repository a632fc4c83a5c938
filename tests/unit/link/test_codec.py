import pytest

from weft.api.router.v1 import relay_service_pb2 as pb
from weft.link.frames import (
    MAX_FRAMES_AT_ONCE,
    MAX_PART_BYTES,
    CallStatus,
    Cancel,
    Credit,
    End,
    Frame,
    HalfClose,
    LinkProtocolError,
    Part,
    Start,
    forwardable,
    from_messages,
    to_messages,
)

STATUS = CallStatus(code=14, message="gone", trailing_metadata=(("grpc-status-details-bin", b"\x00\xff"),))


@pytest.mark.parametrize(
    "frame",
    [
        Start(2, "/p.S/M", (("traceparent", "00-1"), ("x-bin", b"\xff\x00")), 1.5, 1000),
        Start(2, "/p.S/M"),
        Part(2, b"\x00" * MAX_PART_BYTES, more=True),
        Part(2, b""),
        HalfClose(4),
        End(6, STATUS),
        End(6, CallStatus()),
        Cancel(1),
        Credit(3, 2**31),
    ],
    ids=lambda frame: type(frame).__name__,
)
def test_a_frame_is_the_same_after_the_wire(frame: Frame) -> None:
    data = pb.AttachRequest(frames=to_messages([frame])).SerializeToString()
    assert from_messages(pb.AttachRequest.FromString(data).frames) == [frame]


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
def test_what_is_no_frame_ends_the_link(message: pb.LinkFrame) -> None:
    with pytest.raises(LinkProtocolError):
        from_messages([message])


def test_what_belongs_to_the_transport_is_not_handed_on() -> None:
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
def test_what_would_break_the_links_protocol_is_not_handed_on(entry: tuple[str, str | bytes]) -> None:
    given = forwardable((entry, ("x-request-id", "r1")))
    assert given == (("x-request-id", "r1"),)
    assert from_messages(to_messages([Start(2, "/p.S/M", given)])) == [Start(2, "/p.S/M", given)]


def test_too_many_frames_at_once_are_refused_before_they_are_looked_at() -> None:
    from_messages([pb.LinkFrame(call_id=2, credit=1)] * MAX_FRAMES_AT_ONCE)
    with pytest.raises(LinkProtocolError):
        from_messages([pb.LinkFrame()] * (MAX_FRAMES_AT_ONCE + 1))
