"""Which changes of requests a watch is sent, and when."""

import asyncio
from datetime import UTC, datetime

import pytest
from kit.request_endings import ending
from kit.scheduling import placement_request

from router_svc.policy.change_buffer import ChangeBuffer, WatchLimits
from router_svc.policy.decisions import FailedAttempt, Loads, Waits
from router_svc.policy.router_request import Request
from router_svc.request_log import RequestLog, RequestLogLimits
from weft.api.common.v1 import receipt_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

LIMITS = WatchLimits(max_waiting_changes=4, max_batch=3, interval_seconds=0.1, figures_interval_seconds=1.0)
WALL = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


def synced(limits: WatchLimits = LIMITS) -> ChangeBuffer:
    buffer = ChangeBuffer(limits)
    assert buffer.take(0.0) == []
    assert buffer.is_synced
    return buffer


def arrive(log: RequestLog, key: int, request_id: str = "", tenant: str = "a") -> None:
    asked = placement_request(request_id or f"r-{key}", tenant=tenant)
    log.note_arrival(Request.of(key, asked, float(key)), WALL)


def waits(key: int, position: int, reason: str = "all 4 slots of qwen are busy") -> Waits:
    return Waits(key=key, position=position, reason=reason, eta_seconds=2.0)


def test_watch_sends_existing_records_in_batches_and_then_changes() -> None:
    buffer = ChangeBuffer(LIMITS, [1, 2, 3, 4])
    buffer.note(9)
    assert [(buffer.take(0.0), buffer.is_synced) for _ in range(3)] == [([1, 2, 3], False), ([4], True), ([9], True)]
    assert buffer.take(1.0) == []


def test_record_changed_before_it_was_sent_is_sent_once() -> None:
    buffer = ChangeBuffer(LIMITS, [1])
    for _ in range(10):
        assert buffer.note(1)
        assert buffer.note(2)
    assert (buffer.take(0.0), buffer.take(0.0), buffer.take(9.0)) == ([1], [2], [])


def test_first_change_after_silence_is_sent_immediately_and_further_ones_after_the_interval() -> None:
    buffer = synced()
    assert buffer.due_at() is None
    buffer.note(1)
    assert buffer.take(5.0) == [1]
    buffer.note(2)
    assert buffer.due_at() == pytest.approx(5.1)
    assert buffer.take(5.05) == []
    assert buffer.take(5.1) == [2]


def test_positions_are_sent_at_most_once_a_second_without_delaying_state_changes() -> None:
    buffer = synced()
    buffer.note_figures(1)
    assert buffer.take(5.0) == [1]
    buffer.note_figures(1)
    buffer.note_figures(2)
    buffer.note(3)
    assert buffer.take(5.2) == [3]
    assert buffer.due_at() == pytest.approx(6.0)
    assert buffer.take(6.0) == [1, 2]


def test_positions_of_more_requests_than_one_batch_are_all_sent() -> None:
    buffer = synced()
    for key in range(4):
        buffer.note_figures(key)
    assert buffer.take(5.0) == [0, 1, 2]
    assert buffer.take(5.0 + LIMITS.interval_seconds) == [3]


def test_state_change_precedes_figures_of_the_same_record() -> None:
    buffer = synced()
    buffer.note_figures(0)
    assert buffer.take(1.0) == [0]
    buffer.note_figures(1)
    buffer.note(1)
    assert buffer.take(1.5) == [1]
    assert buffer.due_at() is None


def test_pending_changes_beyond_the_bound_are_refused() -> None:
    buffer = synced()
    assert all(buffer.note(key) for key in range(4))
    assert buffer.note(3), "it waits already"
    assert not buffer.note(4)
    assert not buffer.note_figures(5)


async def test_slow_watch_ends_with_an_error() -> None:
    log = RequestLog()
    with log.watching("", 0, LIMITS, FakeClock()) as watch:
        assert await watch.take() == ([], True)
        for key in range(5):
            arrive(log, key)
        with pytest.raises(WeftError, match="more than 4 changed requests") as caught:
            await watch.take()
    assert caught.value.reason is Reason.WATCH_LAGGED
    assert log.watch_count == 0


async def test_watch_sees_a_request_from_arrival_to_receipt_in_the_newest_state_of_each_step() -> None:
    log, clock = RequestLog(), FakeClock()
    with log.watching("", 0, LIMITS, clock) as watch:
        assert await watch.take() == ([], True)
        waiting = asyncio.ensure_future(watch.take())
        await asyncio.sleep(0)
        arrive(log, 1)
        log.note_decisions([waits(1, 2)], 1.0)
        assert (await waiting)[0] == [1]
        log.note_decisions([Loads(key=1, stage="qwen loads on titan", progress=0.5, eta_seconds=1.0)], 2.0)
        log.note_failed(1, FailedAttempt(1, Reason.CONNECT_FAILED), 2.5)
        log.note_end(ending(1, 3.0, Reason.UNSPECIFIED))
        await clock.advance(1.0)
        assert (await watch.take())[0] == [1]
        assert log.newest(1) is log.find("r-1", 3.0)
        log.note_end(ending(1, 3.0, receipt=receipt_pb2.Receipt(request_id="r-1")))
        await clock.advance(1.0)
        assert (await watch.take())[0] == [1], "the receipt came after the end"


async def test_watch_of_a_tenant_is_not_woken_by_requests_of_another() -> None:
    log, clock = RequestLog(), FakeClock()
    arrive(log, 1, tenant="a")
    arrive(log, 2, tenant="b")
    with log.watching("a", 10, LIMITS, clock) as watch:
        assert await watch.take() == ([1], True)
        log.note_end(ending(2, 3.0))
        arrive(log, 3, tenant="b")
        log.note_end(ending(1, 4.0))
        await clock.advance(1.0)
        assert await watch.take() == ([1], True)
        assert watch._buffer.due_at() is None


async def test_watch_starts_with_running_requests_and_the_requested_number_of_ended_ones() -> None:
    log = RequestLog()
    for key in range(1, 7):
        arrive(log, key)
    for key in (2, 4, 5):
        log.note_end(ending(key, 10.0 + key))
    wide = WatchLimits()
    with log.watching("", 2, wide, FakeClock()) as watch:
        assert await watch.take() == ([1, 3, 6, 5, 4], True)


async def test_position_change_waits_for_its_second_and_a_new_reason_does_not() -> None:
    log, clock = RequestLog(), FakeClock()
    arrive(log, 1)
    log.note_decisions([waits(1, 3)], 1.0)
    with log.watching("", 0, LIMITS, clock) as watch:
        assert await watch.take() == ([1], True)
        log.note_decisions([waits(1, 2)], 2.0)
        assert (await watch.take())[0] == [1]
        log.note_decisions([waits(1, 1)], 2.2)
        assert watch._buffer.due_at() == pytest.approx(clock.monotonic() + LIMITS.figures_interval_seconds)
        log.note_decisions([waits(1, 1, "VRAM: needs 5 GiB")], 2.3)
        assert watch._buffer.due_at() == pytest.approx(clock.monotonic() + LIMITS.interval_seconds)


def test_latest_of_two_requests_with_one_id_is_shown() -> None:
    log = RequestLog()
    arrive(log, 1, "same", "a")
    arrive(log, 2, "same", "a")
    arrive(log, 3, "same", "b")
    assert log.newest(1) is None
    assert log.newest(2) is not None
    assert log.newest(3) is not None


def test_request_forgotten_before_it_was_sent_is_omitted() -> None:
    log = RequestLog(RequestLogLimits(max_ended=1))
    for key in (1, 2):
        arrive(log, key)
        log.note_end(ending(key, 5.0))
    assert log.newest(1) is None
    assert log.newest(2) is not None


async def test_stopping_router_ends_its_watches() -> None:
    log = RequestLog()
    with log.watching("", 0, LIMITS, FakeClock()) as watch:
        await watch.take()
        waiting = asyncio.ensure_future(watch.take())
        await asyncio.sleep(0)
        log.close()
        with pytest.raises(WeftError) as caught:
            await waiting
    assert caught.value.reason is Reason.SHUTTING_DOWN
