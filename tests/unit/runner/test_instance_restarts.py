"""A fault fails the running requests with its reason and restarts the backend, on a fake clock."""

import asyncio
from datetime import UTC

import pytest
from instance_stage import living
from kit.failures import fails
from kit.presence import present
from kit.running_record import running_record

from runner_svc.instance.loader import MAX_CRASH_BYTES
from runner_svc.instance.restart_log import MAX_RESTARTS, RestartLog
from runner_svc.policy.lifecycle import Phase
from runner_svc.request_records import RequestRecords, RequestState
from weft.dispatch.placement import MAX_ATTEMPT_LOG_BYTES, MAX_ATTEMPT_LOG_LINES
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

REFUSED = WeftError(Reason.CONNECT_FAILED, "connection refused")


def _reason(error: WeftError | None) -> Reason:
    assert error is not None
    return error.reason


@pytest.mark.parametrize("reason", [Reason.SERVER_DIED, Reason.OUT_OF_MEMORY])
async def test_crash_ends_every_request_with_its_reason_before_cleanup(reason: Reason) -> None:
    async with living() as stage:
        requests = [await stage.request(name) for name in ("r1", "r2")]
        stage.backend.death_reason = reason
        stage.backend.deaths.put_nowait("signal SIGKILL")
        errors = await asyncio.gather(*requests)
        assert [_reason(error) for error in errors] == [reason] * 2
        assert "signal SIGKILL" in str(errors[0])
        assert isinstance(errors[0], WeftError)
        assert errors[0].engine_exit == "signal SIGKILL"
        await stage.settle()
        assert not stage.instance.slots.holders
        assert (stage.instance.phase, stage.backend.starts, stage.backend.stops) == (Phase.READY, 2, 1)
        assert [record.reason for record in stage.instance.records.all] == [reason] * 2


@pytest.mark.parametrize(("reason", "is_told"), [(Reason.BACKEND_ERROR, True), (Reason.BACKEND_REJECTED, False)])
async def test_engine_failure_error_has_the_last_lines_of_its_log(reason: Reason, *, is_told: bool) -> None:
    async with living() as stage:
        for number in range(MAX_ATTEMPT_LOG_LINES):
            stage.backend.log.feed(f"{number} ".ljust(MAX_ATTEMPT_LOG_BYTES // 3).encode() + b"\n")
        request = await stage.request("r1")
        stage.backend.failures.put_nowait(WeftError(reason, "CUDA error: out of memory"))
        error = await request
        assert isinstance(error, WeftError)
        assert [line[:2] for line in error.engine_log] == (["6 ", "7 ", "8 ", "9 "] if is_told else [])
        assert sum(map(len, error.engine_log)) == (MAX_ATTEMPT_LOG_BYTES if is_told else 0)


@pytest.mark.parametrize("reason", [Reason.CONNECT_FAILED, Reason.HEADERS_TIMEOUT])
async def test_unreachable_backend_is_restarted_and_other_requests_are_notified(reason: Reason) -> None:
    async with living() as stage:
        first, other = await stage.request("r1"), await stage.request("r2")
        stage.backend.failures.put_nowait(WeftError(reason, "no answer"))
        assert [_reason(await first), _reason(await other)] == [reason, Reason.WORKER_RESTARTED]
        await stage.settle()
        assert (stage.instance.phase, stage.instance.restart_count) == (Phase.READY, 1)
        assert Reason(stage.instance.restart_log.all[0].reason) is reason


async def test_failure_of_a_request_from_an_earlier_start_does_not_affect_the_current_one() -> None:
    async with living() as stage:
        stage.instance._lifecycle.note_failure(REFUSED, start=0)
        await stage.settle()
        assert stage.instance.restart_count == 0
        stage.instance._lifecycle.note_failure(REFUSED, start=1)
        await stage.settle()
        assert stage.instance.restart_count == 1


async def test_verdict_takes_precedence_over_the_connection_error() -> None:
    async with living() as stage:
        stage.backend.error_when_cancelled = REFUSED
        request = await stage.request()
        (record,) = stage.instance.records.running
        record.fail(WeftError(Reason.STALL_TIMEOUT, "no token for 120 s"))
        record.fail(WeftError(Reason.WORKER_RESTARTED, "too late to say so"))
        assert _reason(await request) is Reason.STALL_TIMEOUT
        assert (record.state, record.reason) == (RequestState.FAILED, Reason.STALL_TIMEOUT)
        await stage.settle()
        assert stage.instance.restart_count == 0, "the broken connection was taken for a fault"


async def test_verdict_takes_precedence_at_any_stage_of_the_request() -> None:
    records = RequestRecords("m", FakeClock())

    async def work() -> None:
        with running_record(records, "r"):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise REFUSED from None

    request = asyncio.create_task(work())
    await asyncio.sleep(0)
    records.fail_all(WeftError(Reason.SERVER_DIED, "signal SIGKILL"))
    with fails(Reason.SERVER_DIED):
        await request
    found = present(records.find("r"))
    assert found.reason is Reason.SERVER_DIED


async def test_stalled_backend_is_restarted_and_only_the_stalled_request_reports_it() -> None:
    async with living() as stage:
        stalled = await stage.request("r1")
        await stage.advance(121.0)
        assert _reason(await stalled) is Reason.STALL_TIMEOUT
        await stage.advance(2.0)
        assert (stage.instance.phase, stage.instance.restart_count) == (Phase.READY, 1)
        assert Reason(stage.instance.restart_log.all[0].reason) is Reason.STALL_TIMEOUT


async def test_unreachable_attached_server_is_absent_immediately_and_polled() -> None:
    async with living(attached=True, attach_retry_seconds=5.0) as stage:
        request, other = await stage.request("r1"), await stage.request("r2")
        stage.backend.load_error = REFUSED
        stage.backend.failures.put_nowait(REFUSED)
        assert [_reason(await request), _reason(await other)] == [Reason.CONNECT_FAILED, Reason.WORKER_RESTARTED]
        await stage.settle()
        assert stage.state == (Phase.FAILED, "connection refused")
        with fails(Reason.BACKEND_NOT_READY), stage.instance.admit("r3"):
            pass
        stage.backend.load_error = None
        await stage.advance(5.0)
        assert (stage.instance.phase, stage.instance.restart_count) == (Phase.READY, 0)
        assert not stage.instance.restart_log.all


async def test_crash_loop_shows_its_reason_and_keeps_its_last_lines_for_readers_of_the_log() -> None:
    async with living(load_error=WeftError(Reason.SERVER_DIED, "exit code 1"), limits={"max_deaths": 2}) as stage:
        assert stage.state == (Phase.CRASH_LOOP, "exit code 1; next start in 10 s; output: weft logs m")
        stage.backend.load_error = None
        await stage.advance(10.0)
        assert stage.instance.phase is Phase.READY
        assert stage.instance.restart_log.crash_lines == ("start 2", "last words"), "not those of the life before"


@pytest.mark.parametrize("reason", [Reason.SERVER_DIED, Reason.TEMPLATE_FAILED])
async def test_unload_of_a_model_that_cannot_be_started_ends_the_attempts(reason: Reason) -> None:
    """With a bad template or file it was loaded again every few minutes, and could evict other models each time."""
    async with living(load_error=WeftError(reason, "cannot be started"), limits={"max_deaths": 1}) as stage:
        await stage.instance.unload()
        await stage.advance(600.0)
        assert (stage.instance.phase, stage.backend.starts) == (Phase.HIBERNATING, 1)


async def test_stored_crash_output_is_bounded_to_its_end() -> None:
    async with living() as stage:
        lines = [f"{number} " + "x" * 1000 for number in range(200)]
        stage.backend.log.feed("\n".join([*lines, ""]).encode())
        await stage.die()
        kept = stage.instance.restart_log.crash_lines
        assert kept[-1] == lines[-1]
        assert 60_000 < sum(map(len, kept)) <= MAX_CRASH_BYTES


async def test_each_restart_is_recorded_with_its_time_and_duration() -> None:
    async with living() as stage:
        stage.backend.loaded.clear()
        await stage.clock.advance(60.0)
        at = stage.clock.utc_now()
        await stage.die("exit code 3")
        await stage.clock.advance(4.0)
        (restart,) = stage.instance.restart_log.all
        assert (restart.time.ToDatetime(UTC), Reason(restart.reason), restart.detail) == (
            at,
            Reason.SERVER_DIED,
            "exit code 3",
        )
        assert not restart.HasField("recovery")
        stage.backend.loaded.set()
        await stage.settle()
        assert stage.instance.restart_log.all[0].recovery.ToNanoseconds() == 4e9
        assert stage.instance.restart_log.last_ready_at == stage.clock.utc_now()


async def test_model_unloaded_before_recovery_does_not_count_as_recovered_on_reload() -> None:
    async with living() as stage:
        stage.backend.loaded.clear()
        await stage.die("exit code 3")
        await stage.instance.unload()
        stage.backend.loaded.set()
        await stage.instance.load()
        assert [restart.HasField("recovery") for restart in stage.instance.restart_log.all] == [False]


def test_restart_log_is_bounded_and_hibernation_is_not_part_of_a_recovery() -> None:
    clock = FakeClock()
    log = RestartLog(clock)
    for number in range(MAX_RESTARTS + 5):
        log.note(Reason.SERVER_DIED, str(number))
    assert [restart.detail for restart in log.all] == [str(number) for number in range(5, MAX_RESTARTS + 5)]
    log.note_asleep()
    log.note(Reason.SERVER_DIED, "last")
    log.note_ready()
    before, last = log.all[-2:]
    assert not before.HasField("recovery")
    assert last.HasField("recovery")
    assert last.recovery.ToNanoseconds() == 0


async def test_runner_stop_ends_its_requests_first() -> None:
    async with living() as stage:
        request = await stage.request()
        await stage.instance.stop()
        assert _reason(await request) is Reason.WORKER_RESTARTED
        assert stage.instance.phase is Phase.IDLE
