"""The bound on answers that a caller has not read."""

import asyncio

import pytest

from runner_svc.engine_host.channel import ChannelClosedError, UnreadAnswers
from runner_svc.engine_host.messages import Answer, Done, Sound, Worked

SOUND = Sound(id=1, data=b"a", media_type="audio/wav")


@pytest.fixture(autouse=True)
def _bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner_svc.engine_host.channel.MAX_UNREAD_ANSWERS", 2)


async def test_beyond_the_bound_progress_is_left_out_and_the_rest_is_kept() -> None:
    unread = UnreadAnswers()
    answers: list[Answer] = [Worked(id=1, done=1), SOUND, Worked(id=1, done=2), SOUND, Done(id=1)]
    for answer in answers:
        unread.put_now(answer)
    assert await unread.take() == [*answers[:2], *answers[3:]]


async def test_a_writer_waits_for_room_and_a_closed_request_lets_it_go() -> None:
    unread = UnreadAnswers()
    for _ in range(2):
        await unread.put(SOUND)
    waiting = asyncio.create_task(unread.put(SOUND))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert len(await unread.take()) == 2
    await waiting
    assert await unread.take() == [SOUND]
    for _ in range(2):
        await unread.put(SOUND)
    waiting = asyncio.create_task(unread.put(SOUND))
    await asyncio.sleep(0)
    unread.close()
    await waiting
    assert len(await unread.take()) == 2, "what had arrived can be read"
    with pytest.raises(ChannelClosedError):
        await unread.take()
