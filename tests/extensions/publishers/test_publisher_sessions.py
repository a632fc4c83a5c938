"""A publisher's session and its tasks: stepped with a clock of the test, without HTTP."""

import asyncio

import pytest
from kit.failures import fails

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_extensions.publishers.messages import Chunk
from weft_extensions.publishers.session import EventStream, PublisherLimits, PublisherSession
from weft_testing.fake_clock import FakeClock

LIMITS = PublisherLimits(max_tasks=2, max_waiting_chunks=2)
LIMIT_SECONDS = 5.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def session(clock: FakeClock) -> PublisherSession:
    return PublisherSession("ann", "pub_secret", LIMITS, clock)


async def _events(stream: EventStream) -> str:
    async with asyncio.timeout(LIMIT_SECONDS):
        return (await stream.get()).decode()


async def test_task_waits_for_the_stream_and_is_resent_until_it_starts(session: PublisherSession) -> None:
    task = session.submit()
    first = session.open_stream()
    assert task.id in await _events(first)
    session.close_stream(first)
    second = session.open_stream()
    assert task.id in await _events(second)
    await task.put(Chunk(b"{}", done=False), now=0.0)
    third = session.open_stream()
    assert "event: end" in await _events(second), "the stream that was replaced does not end"
    assert await second.get() == b""
    assert third.empty()


async def test_task_over_the_limit_is_rejected(session: PublisherSession) -> None:
    for _ in range(2):
        session.submit()
    with fails(Reason.NO_SLOT_AVAILABLE, match="2 tasks, which is its limit"):
        session.submit()


async def test_publisher_waits_for_a_slow_caller(session: PublisherSession) -> None:
    task = session.submit()
    for number in range(2):
        await task.put(Chunk(b"%d" % number, done=False), now=0.0)
    third = asyncio.create_task(task.put(Chunk(b"2", done=True), now=0.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not third.done()
    read = [await task.next() for _ in range(3)]
    assert [piece.data for piece in read if isinstance(piece, Chunk)] == [b"0", b"1", b"2"]
    await third
    with pytest.raises(WeftError, match="its answer is complete"):
        await task.put(Chunk(b"3", done=False), now=0.0)


async def test_waiting_post_ends_with_its_task(session: PublisherSession) -> None:
    task = session.submit()
    for _ in range(2):
        await task.put(Chunk(b"{}", done=False), now=0.0)
    waiting = asyncio.create_task(task.put(Chunk(b"{}", done=False), now=0.0))
    await asyncio.sleep(0)
    task.fail(WeftError(Reason.CANCELLED, "the caller disconnected"))
    with fails(Reason.NOT_FOUND):
        await waiting


async def test_waiting_post_ends_when_the_caller_disconnects(session: PublisherSession) -> None:
    task = session.submit()
    stream = session.open_stream()
    await _events(stream)
    for _ in range(2):
        await task.put(Chunk(b"{}", done=False), now=0.0)
    waiting = asyncio.create_task(task.put(Chunk(b"{}", done=False), now=0.0))
    await asyncio.sleep(0)
    session.close_task(task)
    async with asyncio.timeout(LIMIT_SECONDS):
        with pytest.raises(WeftError, match="the caller disconnected"):
            await waiting
    assert "event: cancel" in await _events(stream)


async def test_session_end_ends_its_tasks_after_delivering_received_chunks(session: PublisherSession) -> None:
    task, complete = session.submit(), session.submit()
    await task.put(Chunk(b"{}", done=False), now=0.0)
    await complete.put(Chunk(b"{}", done=True), now=0.0)
    session.end(WeftError(Reason.WORKER_LOST, "gone"))
    assert await task.next() == Chunk(b"{}", done=False)
    with fails(Reason.WORKER_LOST):
        await task.next()
    assert await complete.next() == Chunk(b"{}", done=True)
    with pytest.raises(WeftError):
        session.submit()


async def test_session_times_out_without_a_stream_or_heartbeats(session: PublisherSession, clock: FakeClock) -> None:
    await clock.advance(LIMITS.reconnect_seconds - 0.1)
    session.look()
    assert not session.ended.is_set()
    session.open_stream()
    for _ in range(10):
        await clock.advance(LIMITS.heartbeat_interval_seconds)
        session.note_request()
        session.look()
    assert not session.ended.is_set()
    await clock.advance(LIMITS.silence_timeout_seconds)
    session.look()
    assert session.end_error is not None
    assert session.end_error.reason is Reason.WORKER_LOST


async def test_stalled_task_fails_without_ending_other_tasks_or_the_session(
    session: PublisherSession, clock: FakeClock
) -> None:
    session.open_stream()
    silent, alive = session.submit(), session.submit()
    await clock.advance(LIMITS.task_silence_seconds - 40)
    session.note_request()
    alive.last_line = clock.monotonic()
    await clock.advance(40)
    session.look()
    assert silent.failure is not None
    assert silent.failure.reason is Reason.STALL_TIMEOUT
    assert alive.failure is None
    assert session.end_error is None


async def test_time_of_a_slow_caller_does_not_count_as_silence_of_the_publisher(
    session: PublisherSession, clock: FakeClock
) -> None:
    """Its post had waited for the caller; the task stalled as soon as the caller had read everything."""
    session.open_stream()
    task = session.submit()
    await task.put(Chunk(b"{}", done=False), now=clock.monotonic())
    await clock.advance(LIMITS.task_silence_seconds + 1)
    session.note_request()
    session.look()
    await task.next()
    await clock.advance(1)
    session.look()
    failures = [task.failure]
    await clock.advance(LIMITS.task_silence_seconds - 1)
    session.note_request()
    session.look()
    failures.append(task.failure)
    assert [failure and failure.reason for failure in failures] == [None, Reason.STALL_TIMEOUT]
