"""The channel to a host program whose engine works on several requests at once."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from scripted_engine import SLOTS

from runner_svc.engine_host.channel import ChannelClosedError, EngineChannel
from runner_svc.engine_host.messages import TOKEN_VARIABLE, Answer, Done, Generate, Token, Tokenize, Tokens
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


async def _ask(channel: EngineChannel, prompt: str) -> list[Answer]:
    async with (
        asyncio.timeout(30),
        aclosing(channel.answers_to(Generate(id=channel.next_id(), prompts=[prompt]))) as arrivals,
    ):
        return [answer async for answers in arrivals for answer in answers]


def _text(answers: list[Answer]) -> str:
    return "".join(answer.text for answer in answers if isinstance(answer, Token))


async def test_two_requests_are_worked_on_side_by_side() -> None:
    async with _running() as (channel, _):
        assert list(map(_text, await asyncio.gather(_ask(channel, "meet"), _ask(channel, "meet")))) == ["end", "end"]


async def test_a_request_that_is_cancelled_or_fails_ends_alone() -> None:
    async with _running() as (channel, _):
        endless = Generate(id=channel.next_id(), prompts=["endless"])
        async with asyncio.timeout(30), aclosing(channel.answers_to(endless)) as running:
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


async def test_a_slow_reader_holds_up_no_other_request_and_loses_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner_svc.engine_host.channel.MAX_UNREAD_ANSWERS", 4)
    async with _running() as (channel, _):
        slow = Generate(id=channel.next_id(), prompts=["count 5000"])
        async with asyncio.timeout(30), aclosing(channel.answers_to(slow)) as running:
            seen = await anext(running)
            # The messages of one connection arrive in order: the slow request's are behind this one's.
            assert _text(await _ask(channel, "count 5000")).startswith("0,1,2,")
            assert await channel.ping(10.0)
            rest = [answers async for answers in running]
        assert max(map(len, rest)) <= 4 + 2, "what is not read is bounded"
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


async def test_a_text_with_too_many_tokens_is_refused_and_the_engine_goes_on() -> None:
    async with _running() as (channel, _):

        async def tokens(text: str) -> list[int]:
            asked = Tokenize(id=channel.next_id(), text=text)
            async with asyncio.timeout(60), aclosing(channel.answers_to(asked)) as arrivals:
                return [
                    i async for answers in arrivals for each in answers if isinstance(each, Tokens) for i in each.ids
                ]

        with pytest.raises(WeftError, match="too many tokens"):
            await tokens("6000000")
        assert await tokens("3") == [0, 1, 2]
