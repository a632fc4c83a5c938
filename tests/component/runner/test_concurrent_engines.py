"""The channel to a host program whose engine works on several requests at once."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from scripted_engine import SLOTS

from runner_svc.engine_host.channel import ChannelClosedError, EngineChannel
from runner_svc.engine_host.messages import TOKEN_VARIABLE, Answer, Done, Hello, Sound, Speak, encode
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

pytestmark = pytest.mark.slow("starts engine processes")

PROGRAM = Path(__file__).with_name("scripted_engine.py")


@asynccontextmanager
async def _running() -> AsyncGenerator[tuple[EngineChannel, asyncio.subprocess.Process]]:
    channel = EngineChannel()
    await channel.open()
    environment = {**os.environ, TOKEN_VARIABLE: channel.token, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = await asyncio.create_subprocess_exec(sys.executable, str(PROGRAM), str(channel.path), env=environment)
    try:
        async with asyncio.timeout(30):
            assert (await channel.ready()).slots == SLOTS
        yield channel, process
    finally:
        await channel.close()
        async with asyncio.timeout(10):
            assert await process.wait() == 0, "the program ends with its connection"


def _request(channel: EngineChannel, text: str) -> Speak:
    return Speak(id=channel.next_id(), text=text, voice="", format="")


async def _ask(channel: EngineChannel, text: str) -> list[Answer]:
    async with asyncio.timeout(30), aclosing(channel.answers_to(_request(channel, text))) as arrivals:
        return [answer async for answers in arrivals for answer in answers]


def _text(answers: list[Answer]) -> str:
    return b"".join(answer.data for answer in answers if isinstance(answer, Sound)).decode()


async def test_two_requests_are_worked_on_side_by_side() -> None:
    async with _running() as (channel, _):
        assert list(map(_text, await asyncio.gather(_ask(channel, "meet"), _ask(channel, "meet")))) == ["end", "end"]


async def test_a_request_that_is_cancelled_or_fails_ends_alone() -> None:
    async with _running() as (channel, _):
        async with asyncio.timeout(30), aclosing(channel.answers_to(_request(channel, "endless"))) as running:
            assert await anext(running)
            with pytest.raises(WeftError) as refused:
                await _ask(channel, "refuse not this one")
            assert (refused.value.reason, refused.value.message) == (Reason.INVALID_ARGUMENT, "not this one")
            with pytest.raises(WeftError) as failed:
                await _ask(channel, "fail broken")
            assert failed.value.reason is Reason.BACKEND_ERROR
            assert await anext(running), "the other request goes on"
        # Both slots are free again: the cancelled request has left its own.
        await asyncio.gather(_ask(channel, "meet"), _ask(channel, "meet"))


async def test_a_slow_reader_holds_up_no_other_request_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner_svc.engine_host.channel.MAX_UNREAD_ANSWERS", 4)
    async with _running() as (channel, _):
        async with asyncio.timeout(30), aclosing(channel.answers_to(_request(channel, "count 5000"))) as running:
            seen = await anext(running)
            # The messages of one connection arrive in order: the slow request's are behind this one's.
            assert _text(await _ask(channel, "count 5000")).startswith("0,1,2,")
            assert await channel.ping(10.0)
            rest = [answers async for answers in running]
        seen += [answer for answers in rest for answer in answers]
        assert _text(seen) == "".join(f"{number}," for number in range(5000)) + "end"
        assert isinstance(seen[-1], Done)


async def test_a_channel_that_closes_fails_every_request() -> None:
    async with _running() as (channel, process):
        waiting = [asyncio.create_task(_ask(channel, "endless")) for _ in range(SLOTS)]
        # Each has sent its request and waits for an answer.
        assert await channel.ping(10.0)
        await channel.close()
        for request in waiting:
            with pytest.raises(ChannelClosedError):
                await request
        assert await process.wait() == 0


def _send_hello(token: str) -> Callable[[str], socket.socket]:
    def connect(path: str) -> socket.socket:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.connect(path)
        line.sendall(encode(Hello(token, 1)))
        return line

    return connect


@pytest.mark.parametrize("token", ["", "wrong", "ü"])
async def test_a_stranger_on_the_socket_is_never_taken_for_the_engine(token: str) -> None:
    channel = EngineChannel()
    await channel.open()
    try:
        assert channel.path.parent.stat().st_mode & 0o777 == 0o700
        with await asyncio.to_thread(_send_hello(token), str(channel.path)) as stranger:
            stranger.settimeout(5.0)
            assert await asyncio.to_thread(stranger.recv, 1) == b"", "the stranger is shut out"
        assert not await channel.ping(0.1)
        with await asyncio.to_thread(_send_hello(channel.token), str(channel.path)):
            assert await _gone(channel.path.parent)
    finally:
        await channel.close()
    assert not channel.path.parent.exists()


async def test_a_machine_without_room_for_a_socket_has_no_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_long = tmp_path / ("x" * 100)
    too_long.mkdir()
    for folder in (tmp_path / "nowhere", too_long):
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        with pytest.raises(WeftError, match="no socket") as failed:
            await EngineChannel().open()
        assert failed.value.reason is Reason.CONNECT_FAILED


async def _gone(path: Path) -> bool:
    for _ in range(500):
        if not await asyncio.to_thread(path.exists):
            return True
        await asyncio.sleep(0.01)
    return False
