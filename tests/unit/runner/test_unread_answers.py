"""The bound on answers that a caller has not read."""

import asyncio

import pytest

from runner_svc.engine_host.channel import ChannelClosedError, UnreadAnswers
from runner_svc.engine_host.messages import Answer, Done, PromptProgress, Token


@pytest.fixture(autouse=True)
def _bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner_svc.engine_host.channel.MAX_UNREAD_ANSWERS", 2)


async def test_beyond_the_bound_tokens_of_a_choice_are_joined_and_ends_are_kept() -> None:
    unread = UnreadAnswers()
    answers: list[Answer] = [
        Token(1, 0, "a"),
        Token(1, 1, "b"),
        Token(1, 0, "c"),
        Token(1, 1, "d"),
        PromptProgress(1, 9, 9, 0),
        Token(1, 0, "e", "stop"),
        Token(1, 1, "", "length"),
        Done(id=1, prompt_tokens=1),
    ]
    for answer in answers:
        unread.put_now(answer)
    assert await unread.take() == [Token(1, 0, "ac"), Token(1, 1, "bd"), *answers[5:]]


async def test_a_writer_waits_for_room_and_a_closed_request_lets_it_go() -> None:
    unread = UnreadAnswers()
    for _ in range(2):
        await unread.put(Token(1, 0, "a"))
    waiting = asyncio.create_task(unread.put(Token(1, 0, "b")))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert len(await unread.take()) == 2
    await waiting
    assert await unread.take() == [Token(1, 0, "b")]
    for _ in range(2):
        await unread.put(Token(1, 0, "a"))
    waiting = asyncio.create_task(unread.put(Token(1, 0, "b")))
    await asyncio.sleep(0)
    unread.close()
    await waiting
    assert len(await unread.take()) == 2, "what had arrived can be read"
    with pytest.raises(ChannelClosedError):
        await unread.take()
