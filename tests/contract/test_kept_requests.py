"""Records of requests over restarts, on both kinds of databases: what is found again, and what is lost."""

import asyncio
from collections import Counter
from contextlib import aclosing
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kept_router import ENDED, NOON, KeptRouter, a_receipt
from kit.request_endings import ending

from router_svc.loop import LoopDeps, SchedulingLoop, TicketIssuer, WakeFinished
from router_svc.placement import LocalPlacement
from router_svc.policy.decisions import FailedAttempt, Rejects, Wakes
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.pool_settings import Settings
from router_svc.policy.router_request import Request
from router_svc.request_log import RequestLogLimits
from router_svc.store.database import SCHEMA
from weft.api.common.v1 import priority_pb2, warning_pb2
from weft.api.router.v1 import request_pb2, request_service_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.timestamps import stamp_of
from weft.sql.connections import Tx
from weft.sql.migrations import bring_up_to_date
from weft.sql.store import Store
from weft_testing.fake_clock import FakeClock

pytest_plugins = ("database_fixtures",)

FAILED = request_service_pb2.REQUEST_SELECTION_FAILED
COMPLETED = request_service_pb2.REQUEST_SELECTION_COMPLETED
RequestRecord = request_pb2.RequestRecord
LOST = Reason.ROUTER_LOST.value
TENANT = "ann"


class NoWaker:
    """No model of these tests sleeps."""

    def begin(self, wakes: Wakes, finished: WakeFinished) -> None:
        raise AssertionError(f"{wakes.model} is ready")

    def give_up(self, model: str) -> None:
        raise AssertionError(f"{model} waits for no memory")


async def refused(router: KeptRouter, request_id: str, tenant: str = "") -> Reason:
    with pytest.raises(WeftError) as caught:
        await router.requests.request(request_id, tenant)
    return caught.value.reason


async def stored(router: KeptRouter) -> int:
    return int(await router.database.value("SELECT count(*) FROM request_records"))


async def test_request_that_ended_before_a_kill_is_explained_as_before(database_url: str) -> None:
    router = await KeptRouter(database_url).start()
    key = router.arrive("r-1", client_id="laptop", asked_model="alias")
    await router.clock.advance(2.5)
    router.end(key, "r-1", reason=Reason.BACKEND_ERROR)
    before = await router.requests.request("r-1")
    await router.flush()
    again = await router.restarted(after=7.0)
    assert await again.requests.request("r-1") == before
    assert await again.requests.cancel("r-1", "", "key:k") == before
    assert before.receipt.usage.completion_tokens == 5
    assert before.decisions[0].detail
    assert (before.end_time.ToDatetime() - before.arrive_time.ToDatetime()) == timedelta(seconds=2.5)
    await again.kill()


async def test_error_with_a_nul_and_all_later_requests_are_recorded(database_url: str) -> None:
    """PostgreSQL refuses NUL in a text: the batch with it was never written, and so no request after it."""
    router = await KeptRouter(database_url).start()
    key = router.arrive("r-1")
    error = FailedAttempt(1, Reason.BACKEND_ERROR, "cannot parse 'a\x00b'")
    router.records.requests.note_failed(key, error, router.clock.monotonic())
    router.end(key, "r-1", reason=Reason.BACKEND_ERROR)
    cancelled = Request.of(99, router.asked("r-2", TENANT), router.clock.monotonic())
    cancelled.cancelled_by = "ann\x00"
    router.records.requests.note_arrival(cancelled, router.clock.utc_now())
    router.records.requests.note_end(ending(cancelled.key, router.clock.monotonic()))
    router.chat("r-3")
    await router.flush()
    again = await router.restarted()
    assert await again.ended_ids() == ["r-3", "r-2", "r-1"]
    assert (await again.requests.request("r-1")).message == "cannot parse 'a\x00b'"
    assert (await again.requests.request("r-2")).cancelled_by == "ann\x00"
    await again.kill()


async def test_times_survive_a_kill_to_the_microsecond(database_url: str) -> None:
    router = await KeptRouter(database_url).start()
    names = [f"r-{number}" for number in range(40)]
    for number, name in enumerate(names):
        key = router.arrive(name)
        # Between two microseconds: seconds since 1970 as a float are a quarter of one apart.
        await router.clock.advance(0.123456 + number * 1.3e-7)
        router.end(key, name)
    before = [await router.requests.request(name) for name in names]
    await router.flush()
    again = await router.restarted(after=7.0)
    assert [await again.requests.request(name) for name in names] == before
    await again.kill()


async def test_state_not_flushed_before_a_kill_is_unknown(database_url: str) -> None:
    router = await KeptRouter(database_url).start()
    router.chat("r-1")
    await router.flush()
    router.chat("r-2")
    router.arrive("r-3")
    again = await router.restarted()
    assert await again.ended_ids() == ["r-1"]
    assert await refused(again, "r-2") is await refused(again, "r-3") is Reason.NOT_FOUND
    await again.kill()


async def test_request_running_at_a_kill_is_reported_lost_with_its_router(database_url: str) -> None:
    router = await KeptRouter(database_url).start()
    router.arrive("r-1")
    await router.flush()
    again = await router.restarted(after=30.0)
    found = await again.requests.request("r-1")
    assert (found.state, found.reason) == (RequestRecord.STATE_ENDED, LOST)
    assert "alpha" in found.message
    # Not when it was found: when its router was last known to be there.
    assert found.end_time.ToDatetime() < (NOON + timedelta(seconds=30)).replace(tzinfo=None) or again.database.is_shared
    assert (await again.requests.requests()).total_count == 0
    listed = await again.requests.requests(selection=FAILED)
    assert [(record.request_id, record.reason) for record in listed.requests] == [("r-1", LOST)]
    assert (await again.requests.requests(selection=COMPLETED)).total_count == 0
    await again.kill()


async def test_running_request_is_not_listed_as_ended_without_mark_lost(database_url: str) -> None:
    """The row of a request under way says nothing of an end: without `mark_lost` it is not one that ended."""
    router = await KeptRouter(database_url).start()
    router.arrive("r-1")
    await router.flush()
    await router.kill()
    blind = KeptRouter(database_url, clock=router.clock)

    async def nothing() -> int:
        return 0

    blind.service.store.mark_lost = nothing  # type: ignore[method-assign]
    await blind.start()
    assert await blind.ended_ids() == []
    await blind.kill()


async def test_request_placed_again_after_a_restart_is_no_longer_lost(database_url: str) -> None:
    router = await KeptRouter(database_url).start()
    router.arrive("r-1")
    await router.flush()
    again = await router.restarted(after=3.0)
    assert await again.ended_ids() == ["r-1"]
    key = again.arrive("r-1", age_seconds=3.0)
    assert (await again.requests.request("r-1")).state == RequestRecord.STATE_RUNNING
    assert await again.ended_ids() == []
    again.end(key, "r-1")
    await again.flush()
    assert await stored(again) == 1
    third = await again.restarted()
    listed = await third.requests.requests(selection=ENDED)
    assert [(record.request_id, record.reason) for record in listed.requests] == [("r-1", 0)]
    await third.kill()


@pytest.mark.parametrize("was_written", [True, False])
async def test_lost_request_with_a_later_end_is_one_record_with_its_receipt(
    database_url: str, was_written: bool
) -> None:
    router = await KeptRouter(database_url).start()
    router.arrive("r-1", client_id="laptop")
    if was_written:
        await router.flush()
    again = await router.restarted(after=3.0)
    log = again.records.requests
    assert log.lacks_end("r-1", TENANT)
    lost = router.asked("r-1", TENANT)
    before = await again.service.store.find("r-1", TENANT)
    assert (before is not None) == was_written
    log.recover(lost, a_receipt("r-1"), again.clock.monotonic(), again.clock.utc_now(), before)
    assert not log.lacks_end("r-1", TENANT)
    found = await again.requests.request("r-1")
    assert (found.reason, found.receipt.usage.completion_tokens) == (0, 5)
    assert found.client_id == ("laptop" if was_written else "")
    await again.flush()
    assert await stored(again) == 1
    third = await again.restarted()
    assert await third.requests.request("r-1") == found
    assert await third.ended_ids() == ["r-1"]
    await third.kill()


def placement_of(router: KeptRouter) -> LocalPlacement:
    """The placement of a router, which takes ends of requests whose router was lost."""
    tickets = TicketIssuer(router.clock)
    parts = LoopDeps(waker=NoWaker(), tickets=tickets, records=router.records)
    made = LocalPlacement(SchedulingLoop(SchedulerLimits(), Settings(), router.clock, parts))
    made.look_back_in(router.service.store)
    return made


@pytest.mark.parametrize("was_written", [True, False])
async def test_first_end_a_gateway_reports_after_a_kill_wins(database_url: str, *, was_written: bool) -> None:
    router = await KeptRouter(database_url).start()
    router.arrive("r-1", client_id="laptop")
    if was_written:
        await router.flush()
    again = await router.restarted(after=5.0)
    request = again.asked("r-1", TENANT, client_id="laptop", age_seconds=5.0)
    assert await placement_of(again).report_end(request, a_receipt("r-1"))
    found = await again.requests.request("r-1")
    assert (found.reason, found.client_id, found.receipt.usage.completion_tokens) == (0, "laptop", 5)
    assert found.arrive_time.ToDatetime() == NOON.replace(tzinfo=None)
    assert found.end_time.ToDatetime() - found.arrive_time.ToDatetime() == timedelta(seconds=1)
    await again.flush()
    third = await again.restarted(after=5.0)
    assert (await stored(third), await third.ended_ids()) == (1, ["r-1"])
    # It is not lost a second time, and an end that was delivered before is known.
    lost = a_receipt("r-1", reason=Reason.WORKER_LOST)
    assert not await placement_of(third).report_end(request, lost)
    assert await third.requests.request("r-1") == found
    await third.kill()


async def test_end_evicted_from_memory_is_found_in_the_database_and_not_rewritten(database_url: str) -> None:
    router = await KeptRouter(database_url, log=RequestLogLimits(max_ended=1)).start()
    request = router.asked("r-1", TENANT)
    assert await placement_of(router).report_end(request, a_receipt("r-1"))
    router.chat("r-2")
    await router.flush()
    assert not await placement_of(router).report_end(request, a_receipt("r-1", reason=Reason.WORKER_LOST))
    await router.flush()
    assert await stored(router) == 2
    assert (await router.requests.request("r-1")).reason == 0
    await router.kill()


async def test_end_report_is_rejected_while_the_database_is_unavailable(database_url: str) -> None:
    router = await KeptRouter(database_url).start()
    await router.database.close()
    with pytest.raises(WeftError) as refused:
        await placement_of(router).report_end(router.asked("r-1", TENANT), a_receipt("r-1"))
    assert refused.value.reason is Reason.SERVICE_UNAVAILABLE
    await router.kill()


async def test_receipt_arriving_after_its_rejection_was_written_is_written_too(database_url: str) -> None:
    router = await KeptRouter(database_url).start()
    key = router.arrive("r-1")
    refusal = Rejects(key=key, reason=Reason.QUEUE_TIMEOUT, message="too long")
    router.records.requests.note_decisions([refusal], router.clock.monotonic())
    await router.flush()
    router.end(key, "r-1", reason=Reason.QUEUE_TIMEOUT)
    await router.flush()
    again = await router.restarted()
    found = await again.requests.request("r-1")
    assert (found.reason, found.message, found.HasField("receipt")) == (Reason.QUEUE_TIMEOUT.value, "too long", True)
    assert await stored(again) == 1
    await again.kill()


async def test_lists_continue_from_memory_into_the_database_without_duplicates(database_url: str) -> None:
    router = await KeptRouter(database_url, log=RequestLogLimits(max_ended=3)).start()
    for number in range(10):
        router.chat(f"r-{number}", tenant="ann" if number % 2 else "bob")
        await router.clock.advance(1.0)
        if number == 6:
            await router.flush()
    everything = [f"r-{number}" for number in reversed(range(10))]
    # The last ones are in memory alone.
    assert (await router.ended_ids())[:3] == everything[:3]
    await router.flush()
    assert await router.ended_ids() == everything
    assert await router.ended_ids(limit=5) == everything[:5]
    assert (await router.requests.requests(limit=5, selection=ENDED)).total_count == 10
    assert await router.ended_ids(tenant="ann") == [name for name in everything if int(name[2:]) % 2]
    again = await router.restarted(after=5.0)
    assert await again.ended_ids() == everything
    again.chat("r-10")
    assert await again.ended_ids(limit=2) == ["r-10", "r-9"]
    assert (await again.requests.requests(selection=ENDED)).total_count == 11
    # One that memory has no more is found, too, and of its tenant alone.
    assert (await again.requests.request("r-0")).tenant == "bob"
    assert await refused(again, "r-0", "ann") is Reason.NOT_FOUND
    await again.kill()


async def test_watch_starts_with_requests_evicted_from_memory_too(database_url: str) -> None:
    router = await KeptRouter(database_url, log=RequestLogLimits(max_ended=2)).start()
    for number in range(6):
        router.chat(f"r-{number}", tenant="ann" if number else "bob")
    await router.flush()
    again = await router.restarted()
    again.arrive("r-6")
    for tenant, limit, expected in (
        ("", 100, ["r-6", "r-5", "r-4", "r-3", "r-2", "r-1", "r-0"]),
        ("ann", 4, ["r-6", "r-5", "r-4", "r-3", "r-2"]),
        ("", 1, ["r-6", "r-5"]),
        ("", 0, ["r-6"]),
    ):
        found: set[str] = set()
        async with aclosing(again.requests.watch(tenant, limit)) as responses:
            async for response in responses:
                found |= {record.request_id for record in response.requests}
                if response.synced:
                    break
        assert found == set(expected)
    await again.kill()


async def test_records_beyond_the_count_and_age_limits_are_deleted(database_url: str) -> None:
    router = await KeptRouter(database_url, keep_seconds=100.0, max_records=5).start()
    for number in range(8):
        router.chat(f"r-{number}")
        await router.clock.advance(1.0)
    await router.flush()
    await router.service.store.sweep()
    assert await stored(router) == 5
    assert (await router.service.store.find("r-2", "")) is None
    assert (await router.service.store.find("r-3", "")) is not None
    await router.clock.advance(98.0)
    await router.service.store.sweep()
    assert 0 < await stored(router) < 5
    await router.clock.advance(10.0)
    await router.service.store.sweep()
    assert await stored(router) == 0
    await router.kill()


async def test_record_written_with_a_fast_clock_is_not_retained_longer(database_url: str) -> None:
    ahead = FakeClock(utc=NOON + timedelta(days=1_000))
    router = await KeptRouter(database_url, clock=ahead, keep_seconds=100.0).start()
    router.chat("r-1")
    await router.flush()
    await router.kill()
    again = await KeptRouter(database_url, keep_seconds=100.0).start()
    await again.service.store.sweep()
    await again.clock.advance(101.0)
    await again.service.store.sweep()
    assert await stored(again) == 0
    await again.kill()


async def test_backlog_for_an_unavailable_database_is_bounded_counted_and_reported(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = await KeptRouter(database_url, max_unwritten=4, log=RequestLogLimits(max_ended=4)).start()
    write = router.service.store.write

    async def away(_batch: object) -> None:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "away")

    monkeypatch.setattr(router.service.store, "write", away)
    for number in range(10):
        router.chat(f"r-{number}")
        with pytest.raises(WeftError):
            await router.service.flush()
    assert sum(router.dropped) == 6
    listed = await router.requests.requests(selection=ENDED)
    assert listed.unwritten_count == 6
    monkeypatch.setattr(router.service.store, "write", write)
    await router.flush()
    assert sum(router.dropped) == 6
    again = await router.restarted()
    assert await again.ended_ids() == ["r-9", "r-8", "r-7", "r-6"]
    await again.kill()


async def test_lists_report_missing_older_requests_while_the_database_is_unavailable(database_url: str) -> None:
    router = await KeptRouter(database_url).start()
    router.chat("r-1")
    assert not (await router.requests.requests(selection=ENDED)).history_missing
    await router.kill()
    listed = await router.requests.requests(selection=ENDED)
    assert ([record.request_id for record in listed.requests], listed.history_missing) == (["r-1"], True)
    assert await refused(router, "r-0") is Reason.SERVICE_UNAVAILABLE


async def test_stop_flushes_everything(database_url: str) -> None:
    router = await KeptRouter(database_url).start()
    router.chat("r-1")
    await router.service.stop(0.0)
    again = await KeptRouter(database_url, clock=router.clock).start()
    assert await again.ended_ids() == ["r-1"]
    await again.kill()


async def test_rows_contain_no_prompt_or_answer_text(database_url: str) -> None:
    """What is kept is what was shown before: names, decisions and the receipt; prompts and answers never come here."""
    router = await KeptRouter(database_url).start()
    receipt, key = a_receipt("r-1"), router.arrive("r-1")
    receipt.signals.add(name="QUOTES").arguments.fields.add(name="quoted")
    receipt.warnings.add(code=warning_pb2.WARNING_CODE_REPETITION, message="quoted")
    receipt.attempts.add(message="it died", engine_exit="signal SIGKILL", engine_log=["quoted"])
    router.records.requests.note_end(ending(key, router.clock.monotonic(), Reason.UNSPECIFIED, receipt))
    await router.flush()
    row = await router.database.row("SELECT * FROM request_records")
    assert row is not None
    assert set(row._fields) == {
        *("incarnation", "key", "router", "number", "request_id", "tenant", "arrived_at", "ended_at", "reason"),
        "record",
    }
    assert b"quoted" not in row.record
    assert b"it died" in row.record
    assert (await router.requests.request("r-1")).receipt.signals[0].name == "QUOTES"
    await router.kill()


async def test_records_from_before_they_were_messages_are_shown_as_they_were(database_url: str) -> None:
    receipt = a_receipt("r-1", reason=Reason.BACKEND_ERROR)
    decisions = RequestRecord(decisions=[request_pb2.DecisionRecord(detail="sent")])
    ended = {
        "incarnation": "inc-1",
        "key": 1,
        "router": "alpha",
        "number": 1,
        "request_id": "r-1",
        "tenant": "ann",
        "client_id": "laptop",
        "target": "demo",
        "asked_model": "alias",
        "priority": 2,
        "arrived_at": NOON.timestamp() - 9.5,
        "ended_at": NOON.timestamp() - 7.0,
        "reason": Reason.BACKEND_ERROR.value,
        "message": "it died",
        "cancelled_by": "",
        "decisions": decisions.SerializeToString(),
        "receipt": receipt.SerializeToString(),
    }
    begun = {"key": 2, "number": 0, "request_id": "r-2", "ended_at": None, "reason": 0, "message": "", "receipt": None}

    def write(tx: Tx) -> None:
        bring_up_to_date(tx, SCHEMA, to="0017")
        tx.insert("request_records", ended, ended | begun)

    earlier = Store(database_url, "router")
    await earlier.open()
    await earlier.run(write)
    await earlier.close()
    router = await KeptRouter(database_url).start()
    found = await router.requests.request("r-1")
    assert found == RequestRecord(
        request_id="r-1",
        tenant="ann",
        client_id="laptop",
        target="demo",
        asked_model="alias",
        priority=priority_pb2.PRIORITY_NORMAL,
        state=RequestRecord.STATE_ENDED,
        arrive_time=stamp_of(NOON.timestamp() - 9.5),
        end_time=stamp_of(NOON.timestamp() - 7.0),
        reason=Reason.BACKEND_ERROR.value,  # type: ignore[arg-type]  # same numbers
        message="it died",
        receipt=receipt,
        decisions=decisions.decisions,
    )
    lost = await router.requests.request("r-2")
    assert (lost.reason, lost.target, lost.HasField("receipt")) == (LOST, "demo", False)
    await router.kill()


async def test_request_is_found_by_its_id_without_a_read_of_its_tenant(database_url: str) -> None:
    """SQLite read all 100,000 records of a tenant to find one of them."""
    router = await KeptRouter(database_url).start()
    if not router.database.is_shared:
        plan = "EXPLAIN QUERY PLAN SELECT record FROM request_records WHERE request_id = 'r' AND tenant = 'ann'"
        (step,) = await router.database.rows(plan)
        assert "ix_request_records_request_id (request_id=? AND tenant=?)" in step.detail
    await router.kill()


OPERATIONS = st.lists(st.sampled_from(["begin", "end", "fail", "flush", "kill"]), max_size=40)


@pytest.mark.slow("a database and several restarts per example")
@given(steps=OPERATIONS)
def test_kills_at_any_moment_neither_duplicate_nor_lose_written_requests(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("records")
    asyncio.run(_chaos(f"sqlite:///{folder}/router.db", steps))


async def _chaos(url: str, steps: list[str]) -> None:
    router = await KeptRouter(url, log=RequestLogLimits(max_ended=4)).start()
    running: dict[str, int] = {}
    ended: dict[str, int] = {}
    written: dict[str, int] = {}
    begun_written: set[str] = set()
    for number, step in enumerate(steps):
        await router.clock.advance(1.0)
        if step == "begin":
            running[f"r-{number}"] = router.arrive(f"r-{number}")
        elif step in ("end", "fail") and running:
            name, key = running.popitem()
            reason = {"end": Reason.UNSPECIFIED, "fail": Reason.STALL_TIMEOUT}[step]
            router.end(key, name, reason=reason)
            ended[name] = reason.value
        elif step == "flush":
            await router.service.flush()
            written, begun_written = dict(ended), set(running)
        elif step == "kill":
            router = await router.restarted(after=2.0)
            # One whose end was not written, and whose begin was, is lost.
            survived = written | dict.fromkeys(begun_written, LOST)
            running, ended, written, begun_written = {}, dict(survived), dict(survived), set()
            found = await router.requests.requests(limit=1_000, selection=ENDED)
            shown = {record.request_id: record.reason for record in found.requests}
            assert shown == survived
            assert Counter(record.request_id for record in found.requests).total() == len(survived) == found.total_count
    await router.kill()


async def test_lost_request_that_arrived_long_ago_is_listed_after_a_restart(database_url: str) -> None:
    router = await KeptRouter(database_url, log=RequestLogLimits(keep_seconds=60.0)).start()
    router.arrive("r-1")
    await router.flush()
    await router.clock.advance(100.0)
    router.chat("r-2")
    await router.flush()
    # Without a heartbeat its end is its arrival, before the end of r-2 and too early for memory.
    await router.service.store.leave()
    again = await router.restarted(after=1.0)
    assert sorted(await again.ended_ids()) == ["r-1", "r-2"]
    assert (await again.requests.requests(selection=ENDED)).total_count == 2
    await again.kill()
