"""The pipe of a link of carried calls: who gets it, and what ends it."""

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from weft.api.common.v1 import event_pb2, link_pb2
from weft.api.runner.v1 import call_carrier_service_pb2
from weft.api.runner.v1 import generation_service_pb2 as pb
from weft.dispatch.operations import CHAT
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.rpc import ChannelPool, new_server
from weft.link.carried_calls import CarriedCalls
from weft.link.carriers import CARRIER_LIMITS, CARRY, CarriedCall, Carriers
from weft.link.frames import Side, new_start, new_status
from weft.link.link import MAX_LINK_MESSAGE_BYTES, Link, LinkCall
from weft.link.own_calls import OwnCall
from weft.link.pipe import MAX_GUESTS, NAME_KEY, SECRET_KEY, FramePipe, PipeOffer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pipes need Linux")
SOON_SECONDS = 10.0


async def _answer(request: pb.GenerateRequest, context: Any) -> None:
    if request.agent == "hang":
        await asyncio.Event().wait()
    answer = event_pb2.InferenceEvent(delta=event_pb2.Delta(text="answer"))
    await context.write(pb.GenerateResponse(events=[answer]))


@asynccontextmanager
async def _served(folder: Path) -> AsyncGenerator[tuple[str, CarriedCalls, ChannelPool]]:
    server, served, channels = new_server(), CarriedCalls(), ChannelPool()
    served.serve(CHAT.runner_rpc, _answer)
    served.add_to_server(server)
    address = f"unix:{folder / 'runner.sock'}"
    server.add_insecure_port(address)
    await server.start()
    try:
        async with asyncio.timeout(SOON_SECONDS):
            yield address, served, channels
    finally:
        await channels.close()
        await server.stop(grace=0.5)


async def _begin(carriers: Carriers, address: str, agent: str) -> CarriedCall | OwnCall:
    while (  # noqa: ASYNC110 - the stream is opened in the background
        call := carriers.call(address, CHAT.runner_rpc, pb.GenerateRequest(agent=agent), (), None)
    ) is None:
        await asyncio.sleep(0.005)
    return call


async def _offer(channels: ChannelPool, address: str) -> tuple[Any, str, bytes]:
    """An accepted stream, and the name and the secret of its pipe."""
    channel: Any = await channels.get(address)
    stream = channel.stream_stream(
        CARRY.path,
        request_serializer=CARRY.request.SerializeToString,
        response_deserializer=CARRY.response.FromString,
    )()
    found = dict(await stream.initial_metadata())
    return stream, found[NAME_KEY], bytes.fromhex(found[SECRET_KEY])


class Outside:
    """Connections of other programs, closed with the block."""

    def __init__(self) -> None:
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(f"\0{name}")
        self._writers.append(writer)
        return reader, writer

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)


@pytest.fixture
async def outside() -> AsyncGenerator[Outside]:
    outside = Outside()
    yield outside
    await outside.close()


def _packed(frame: link_pb2.LinkFrame) -> bytes:
    data = frame.SerializeToString()
    return len(data).to_bytes(4, "big") + data


def _call_frames(call_id: int) -> bytes:
    start = link_pb2.LinkFrame(call_id=call_id, start=new_start(CHAT.runner_rpc.path))
    part = link_pb2.MessagePart(data=pb.GenerateRequest().SerializeToString())
    return _packed(start) + _packed(link_pb2.LinkFrame(call_id=call_id, part=part))


async def _next_frame(reader: asyncio.StreamReader) -> link_pb2.LinkFrame:
    length = int.from_bytes(await reader.readexactly(4), "big")
    return link_pb2.LinkFrame.FromString(await reader.readexactly(length))


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return not await reader.read(1)
    except ConnectionResetError:
        return True


async def test_a_stranger_without_the_secret_is_closed_and_the_caller_gets_the_pipe(
    tmp_path: Path, outside: Outside
) -> None:
    async with _served(tmp_path) as (address, _, channels):
        _stream, name, secret = await _offer(channels, address)
        stranger, to_stranger = await outside.connect(name)
        to_stranger.write(bytes(len(secret)) + _call_frames(2))
        assert await _is_closed(stranger)
        silent, _ = await outside.connect(name)
        reader, writer = await outside.connect(name)
        # In two pieces, as a socket may deliver it.
        whole = secret + _call_frames(2)
        writer.write(whole[:40])
        await asyncio.sleep(0.01)
        writer.write(whole[40:])
        answered = await _next_frame(reader)
        assert pb.GenerateResponse.FromString(answered.part.data).events[0].delta.text == "answer"
        assert (await _next_frame(reader)).WhichOneof("kind") == "end"
        assert await _is_closed(silent), "the pipe is taken"
        with pytest.raises(ConnectionError):
            await outside.connect(name)


async def test_an_offer_takes_few_strangers_and_then_the_frames_use_the_stream(
    tmp_path: Path, outside: Outside
) -> None:
    async with _served(tmp_path) as (address, served, channels):
        stream, name, _ = await _offer(channels, address)
        strangers = [await outside.connect(name) for _ in range(MAX_GUESTS)]
        await asyncio.sleep(0.05)
        with pytest.raises(ConnectionError):
            await outside.connect(name)
        frames = [
            link_pb2.LinkFrame(call_id=2, start=new_start(CHAT.runner_rpc.path)),
            link_pb2.LinkFrame(call_id=2, part=link_pb2.MessagePart()),
        ]
        await stream.write(call_carrier_service_pb2.CarryRequest(frames=frames))
        assert (await stream.read()).frames[0].WhichOneof("kind") == "part"
        (link,) = served._links
        assert link._pipe is None
        stream.cancel()
        assert all([await _is_closed(reader) for reader, _ in strangers])


@pytest.mark.parametrize(
    "sent",
    [
        (MAX_LINK_MESSAGE_BYTES + 1).to_bytes(4, "big"),
        (3).to_bytes(4, "big") + b"\xff\xff\xff",
        _packed(link_pb2.LinkFrame(call_id=7, half_close=link_pb2.HalfClose())),
    ],
    ids=["too long", "no frame", "of no call"],
)
async def test_what_breaks_the_protocol_on_a_pipe_ends_the_link(tmp_path: Path, outside: Outside, sent: bytes) -> None:
    async with _served(tmp_path) as (address, served, channels):
        stream, name, secret = await _offer(channels, address)
        reader, writer = await outside.connect(name)
        writer.write(secret + sent)
        assert await _is_closed(reader)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not served._links


async def test_the_loss_of_the_pipe_ends_its_calls_as_lost_and_the_next_call_opens_another(tmp_path: Path) -> None:
    async with _served(tmp_path) as (address, served, channels):
        carriers = Carriers(channels)
        call = await _begin(carriers, address, "hang")
        await asyncio.sleep(0.05)
        (link,) = served._links
        pipe: Any = link._pipe
        pipe.close()
        with pytest.raises(WeftError) as caught:
            await call.read()
        assert caught.value.reason is Reason.WORKER_LOST
        again = await _begin(carriers, address, "")
        assert (await again.read()).events[0].delta.text == "answer"
        (second,) = served._links
        assert second is not link
        assert second._pipe is not None


async def _refuse(call: LinkCall) -> Any:
    raise AssertionError(f"{call.start.method} was called")


class EndedStream:
    """A stream that the peer has ended, whose last frames are still on their way over the pipe."""

    def __init__(self, peer: socket.socket, last: bytes) -> None:
        self._peer = peer
        self._last = last

    async def read(self) -> Any:
        asyncio.get_running_loop().call_later(0.02, self._send)
        return grpc.aio.EOF

    async def write(self, message: Any) -> None:
        raise AssertionError(f"{message} was written to the stream of a pipe")

    def _send(self) -> None:
        self._peer.sendall(self._last)
        self._peer.close()


async def test_the_last_frames_of_a_call_are_read_when_the_stream_ends_before_the_pipe() -> None:
    """Found by test_drain_under_load: calls that had ended when their runner stopped were lost."""
    ours, peer = socket.socketpair()
    link = Link(Side.ROUTER, CARRIER_LIMITS, _refuse)
    await asyncio.get_running_loop().connect_accepted_socket(partial(FramePipe, link), ours)
    call = link.call(CHAT.runner_rpc.path)
    part = link_pb2.LinkFrame(call_id=2, part=link_pb2.MessagePart(data=b"answer"))
    last = _packed(part) + _packed(link_pb2.LinkFrame(call_id=2, end=new_status(0, "", ())))
    await link.run(EndedStream(peer, last), call_carrier_service_pb2.CarryRequest)
    assert await call.read() == b"answer"
    assert await call.read() is None
    assert call.status is not None
    assert call.status.code == 0
    with pytest.raises(WeftError):
        link.call(CHAT.runner_rpc.path)


class SilentStream:
    """A stream on which nothing happens."""

    async def read(self) -> Any:
        await asyncio.Event().wait()

    async def write(self, message: Any) -> None:
        raise AssertionError(f"{message} was written to the stream of a pipe")


async def test_a_link_that_is_stopped_takes_what_its_peer_writes_until_that_has_read_the_last_frames() -> None:
    """A peer that writes to a closed socket drops what it has not read of it."""
    ours, peer = socket.socketpair()
    with peer:
        link = Link(Side.RUNNER, CARRIER_LIMITS, _refuse)
        await asyncio.get_running_loop().connect_accepted_socket(partial(FramePipe, link), ours)
        running = asyncio.create_task(link.run(SilentStream(), call_carrier_service_pb2.CarryResponse))
        await asyncio.sleep(0.01)
        link.stop(WeftError(Reason.SHUTTING_DOWN, "the runner is shutting down"))
        await asyncio.sleep(0.05)
        peer.sendall(_call_frames(2))
        peer.setblocking(False)
        assert peer.recv(1) == b""
        assert not running.done()
    with pytest.raises(WeftError) as caught:
        await asyncio.wait_for(running, SOON_SECONDS)
    assert caught.value.reason is Reason.SHUTTING_DOWN


def _offered() -> tuple[PipeOffer, socket.socket]:
    """An offer, and a connection to it whose secret is there before the offer looks at it."""
    offer = PipeOffer(Link(Side.RUNNER, CARRIER_LIMITS, _refuse))
    offered = {key: str(value) for key, value in offer.start()}
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(f"\0{offered[NAME_KEY]}")
    peer.sendall(bytes.fromhex(offered[SECRET_KEY]))
    peer.setblocking(False)
    return offer, peer


async def _ends_within(peer: socket.socket, seconds: float) -> bool:
    """Whether the other end closes its connection."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            try:
                return await asyncio.get_running_loop().sock_recv(peer, 1) == b""
            except ConnectionResetError:
                return True
    return False


def test_a_pipe_whose_secret_comes_with_its_connection_is_not_closed() -> None:
    """uvloop reads the secret while the connection is still accepted: the end of accepting closed the pipe."""

    async def accepted() -> None:
        for _ in range(20):
            offer, peer = _offered()
            with peer:
                assert not await _ends_within(peer, 0.01)
                offer.stop()
                assert await _ends_within(peer, SOON_SECONDS)

    uvloop.run(accepted())


async def test_a_connection_that_is_accepted_when_its_offer_ends_is_closed() -> None:
    offer, peer = _offered()
    with peer:
        offer.stop()
        assert await _ends_within(peer, SOON_SECONDS)
