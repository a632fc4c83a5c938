"""Frames of a link, made in few words."""

from weft.api.common.v1 import link_pb2 as pb
from weft.link.frames import Metadata, new_start


def start(call_id: int, method: str, metadata: Metadata = (), timeout_seconds: float | None = None) -> pb.LinkFrame:
    return pb.LinkFrame(call_id=call_id, start=new_start(method, metadata, timeout_seconds))


def part(call_id: int, data: bytes, *, more: bool = False) -> pb.LinkFrame:
    return pb.LinkFrame(call_id=call_id, part=pb.MessagePart(data=data, more=more))


def half_close(call_id: int) -> pb.LinkFrame:
    return pb.LinkFrame(call_id=call_id, half_close=pb.HalfClose())


def end(call_id: int, status: pb.CallEnd) -> pb.LinkFrame:
    return pb.LinkFrame(call_id=call_id, end=status)


def cancel(call_id: int) -> pb.LinkFrame:
    return pb.LinkFrame(call_id=call_id, cancel=pb.CallCancel())


def credit(call_id: int, byte_count: int) -> pb.LinkFrame:
    return pb.LinkFrame(call_id=call_id, credit=byte_count)
