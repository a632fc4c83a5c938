"""The delay of the first write of an answer."""

import asyncio

from gateway.http.protocol import HeadWriter


class _Wire(asyncio.WriteTransport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


async def test_head_and_body_that_are_written_together_are_one_write() -> None:
    wire = _Wire()
    writer = HeadWriter(wire, asyncio.get_running_loop())
    writer.write(b"head")
    writer.write(b"body")
    writer.write(b"more")
    await asyncio.sleep(0)
    assert wire.writes == [b"headbody", b"more"]


async def test_a_head_without_a_body_is_sent_at_the_next_turn() -> None:
    wire = _Wire()
    writer = HeadWriter(wire, asyncio.get_running_loop())
    writer.write(b"head")
    await asyncio.sleep(0)
    assert wire.writes == [b"head"]
    writer.write(b"body")
    assert wire.writes == [b"head", b"body"]


async def test_what_is_held_is_sent_before_the_connection_closes() -> None:
    wire = _Wire()
    writer = HeadWriter(wire, asyncio.get_running_loop())
    writer.write(b"head")
    writer.close()
    assert (wire.writes, writer.is_closing()) == ([b"head"], True)
    await asyncio.sleep(0)
    assert wire.writes == [b"head"]
