"""Concurrent loads, unloads, wakes and stops, and what is put away at an end."""

import asyncio
from contextlib import ExitStack

import pytest
from instance_stage import Stage, failure, living, outcome
from kit.recipes import http_recipe

from runner_svc.instance.instance_settings import SleepSettings
from runner_svc.instance.lifecycle_loop import BEFORE_END_SECONDS
from runner_svc.policy.lifecycle import Phase
from runner_svc.policy.load_options import AS_CONFIGURED, LoadPlan, LoadSpec
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

WAKE = http_recipe(url="http://controller/wake")
ASLEEP = (Phase.HIBERNATING, "")
OTHERWISE = LoadSpec(plan=LoadPlan(parameters={"mlock": True}))


async def test_unload_takes_precedence_over_a_running_load() -> None:
    async with living(start_asleep=True, recipe=WAKE, sleep=SleepSettings(after_seconds=10.0)) as stage:
        stage.recipes.go.clear()
        load = await stage.begin(stage.instance.load())
        unload = await stage.begin(stage.instance.unload())
        stage.recipes.go.set()
        assert [await outcome(load), await outcome(unload)] == [None, None]
        await stage.instance.wake()
        await stage.advance(10.0)
        assert stage.state == ASLEEP


async def test_unload_takes_precedence_at_the_moment_a_load_ends() -> None:
    for turns in range(15):
        async with living(start_asleep=True, sleep=SleepSettings(after_seconds=10.0)) as stage:
            stage.backend.loaded.clear()
            load = await stage.begin(stage.instance.load())
            stage.backend.loaded.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            await asyncio.gather(load, stage.instance.unload())
            assert stage.state == ASLEEP
            await stage.instance.wake()
            await stage.advance(10.0)
            assert stage.state == ASLEEP, f"it stayed awake, unloaded {turns} turns after it was ready"


async def test_unload_takes_precedence_over_a_reload_with_other_options_at_any_moment() -> None:
    """Regression: an unload during the reload's own unload returned, and then the model was loaded."""
    for turns in range(1, 40):
        async with living() as stage:
            load = asyncio.create_task(stage.instance.load(OTHERWISE))
            for _ in range(turns):
                await asyncio.sleep(0)
            await stage.instance.unload()
            await asyncio.gather(load, return_exceptions=True)
            assert stage.state == ASLEEP, f"it is awake, unloaded {turns} turns after the load began"


async def test_wake_waits_for_a_reload_with_other_options_at_any_moment() -> None:
    """Regression: a request whose wake the reload interrupted failed with "it was unloaded meanwhile"."""
    for turns in range(40):
        async with living(start_asleep=True) as stage:
            stage.backend.loaded.clear()
            before = asyncio.create_task(stage.instance.wake())
            for _ in range(turns):
                await asyncio.sleep(0)
            load = asyncio.create_task(stage.instance.load(OTHERWISE))
            for _ in range(turns):
                await asyncio.sleep(0)
            meanwhile = asyncio.create_task(stage.instance.wake())
            await stage.settle()
            stage.backend.loaded.set()
            await asyncio.gather(before, load, meanwhile)
            assert (stage.instance.phase, stage.instance.plan) == (Phase.READY, OTHERWISE.plan), f"{turns} turns"


async def test_load_that_a_load_with_other_options_replaces_fails_and_says_so() -> None:
    async with living(start_asleep=True) as stage:
        stage.backend.loaded.clear()
        replaced = await stage.begin(stage.instance.load())
        load = await stage.begin(stage.instance.load(OTHERWISE))
        stage.backend.loaded.set()
        error = await failure(replaced)
        assert (error.reason, error.message) == (Reason.WAKE_FAILED, "it was loaded with other options meanwhile")
        await load
        assert stage.instance.plan == OTHERWISE.plan


async def test_cancelled_reload_leaves_the_model_as_configured_at_any_moment() -> None:
    for turns in range(1, 40):
        async with living() as stage:
            load = asyncio.create_task(stage.instance.load(OTHERWISE))
            for _ in range(turns):
                await asyncio.sleep(0)
            done = load.done()
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
            await stage.settle()
            await stage.instance.wake()
            assert stage.instance.plan == (OTHERWISE.plan if done else AS_CONFIGURED), f"cancelled after {turns} turns"


async def test_cancelled_stop_still_ends_the_backend() -> None:
    for turns in range(30):
        stage = Stage()
        stage.backend.loaded.set()
        await stage.instance.start()
        await stage.settle()
        stage.instance.records.idle.clear()  # as if a request held on to its backend
        stopping = asyncio.create_task(stage.instance.stop())
        for _ in range(turns):
            await asyncio.sleep(0)
        stopping.cancel()
        again = await stage.begin(stage.instance.stop())
        await stage.clock.advance(1.0)
        await asyncio.gather(stopping, again, return_exceptions=True)
        assert stage.backend.stops == 1, f"cancelled after {turns} turns"


async def test_output_before_a_crash_during_a_wake_is_kept() -> None:
    async with living(start_asleep=True) as stage:
        stage.backend.load_error = WeftError(Reason.SERVER_DIED, "exit code 1")
        with pytest.raises(WeftError):
            await stage.instance.wake()
        assert stage.instance.restart_log.crash_lines == ("start 1", "last words")
        assert stage.instance.restart_log.all == ()


async def test_wake_without_a_process_is_not_a_crash_of_the_previous_one() -> None:
    async with living(start_asleep=True, recipe=WAKE) as stage:
        await stage.instance.wake()
        await stage.instance.unload()
        stage.recipes.error = WeftError(Reason.WAKE_FAILED, "exit code 3: no power")
        with pytest.raises(WeftError):
            await stage.instance.wake()
        assert stage.instance.restart_log.crash_lines == ()


async def test_awaited_load_may_take_longer_than_its_waiters_timeout() -> None:
    async with living(start_asleep=True, max_wait_seconds=60.0) as stage:
        stage.backend.loaded.clear()
        wake = await stage.begin(stage.instance.wake())
        await stage.clock.advance(600.0)
        error = await failure(wake)
        assert "still loading" in error.message
        assert (stage.instance.phase, stage.backend.starts, stage.backend.stops) == (Phase.LOADING, 1, 0)
        stage.backend.loaded.set()
        await stage.settle()
        assert stage.instance.phase is Phase.READY


async def test_unload_ends_an_awaited_load_and_it_does_not_restart() -> None:
    for start_asleep in (False, True):
        async with living(start_asleep=start_asleep) as stage:
            stage.backend.loaded.clear()
            if not start_asleep:
                await stage.die("exit code 1")
            waits, left = (asyncio.create_task(stage.instance.load()) for _ in range(2))
            await stage.settle()
            left.cancel()
            starts = stage.backend.starts
            await stage.instance.unload()
            await stage.settle()
            assert (stage.state, stage.backend.starts) == (ASLEEP, starts)
            error = await failure(waits)
            assert (error.reason, error.message) == (Reason.WAKE_FAILED, "it was unloaded meanwhile")


async def test_waiter_arriving_at_the_moment_of_the_outcome_receives_it() -> None:
    for turns in range(25):
        async with living(start_asleep=True) as stage:
            stage.backend.loaded.clear()
            first = await stage.begin(stage.instance.wake())
            stage.backend.loaded.set()
            waiters = [first]
            for _ in range(turns):
                await asyncio.sleep(0)
            waiters.append(asyncio.create_task(stage.instance.wake()))
            await stage.settle()
            unload = asyncio.create_task(stage.instance.unload())
            for _ in range(turns):
                await asyncio.sleep(0)
            waiters.append(asyncio.create_task(stage.instance.unload()))
            await stage.settle()
            assert all(waiter.done() for waiter in (*waiters, unload)), f"{turns} turns"
            assert [await outcome(waiter) for waiter in (*waiters, unload)] == [None] * 4


class _Work:
    """Notes how often the engine had been stopped when it ran."""

    def __init__(self, stage: Stage, error: Exception | None = None) -> None:
        self.at_stops: list[int] = []
        self._stage = stage
        self._error = error
        stage.instance.set_before_end(self._run)

    async def _run(self) -> None:
        self.at_stops.append(self._stage.backend.stops)
        if self._error is not None:
            raise self._error


async def _never_done() -> None:
    await asyncio.Event().wait()


async def test_unload_puts_prompts_away_before_it_stops_the_engine() -> None:
    async with living() as stage:
        work, stops = _Work(stage), stage.backend.stops
        await stage.instance.unload()
        assert (work.at_stops, stage.backend.stops) == ([stops], stops + 1)


async def test_end_of_the_runner_puts_prompts_away_before_it_stops_the_engine() -> None:
    async with living() as stage:
        work, stops = _Work(stage), stage.backend.stops
    assert work.at_stops == [stops]


async def test_end_of_the_runner_puts_nothing_away_for_an_unloaded_model() -> None:
    async with living() as stage:
        work = _Work(stage)
        await stage.instance.unload()
    assert len(work.at_stops) == 1


async def test_nothing_is_put_away_from_an_engine_that_died() -> None:
    async with living() as stage:
        work = _Work(stage)
        await stage.die("killed")
        assert stage.instance.phase is not Phase.HIBERNATING
        assert work.at_stops == []


async def test_failed_storing_does_not_prevent_an_unload() -> None:
    async with living() as stage:
        _Work(stage, WeftError(Reason.BACKEND_ERROR, "no"))
        await stage.instance.unload()
        assert stage.instance.phase is Phase.HIBERNATING


async def test_slow_storing_delays_an_unload_by_its_limit_only() -> None:
    async with living() as stage:
        stage.instance.set_before_end(_never_done)
        unloading = await stage.begin(stage.instance.unload())
        await stage.clock.advance(BEFORE_END_SECONDS - 0.1)
        assert not unloading.done()
        await stage.clock.advance(0.2)
        await unloading
        assert stage.instance.phase is Phase.HIBERNATING


async def test_engine_is_ended_although_the_wait_for_its_end_is_given_up_while_its_prompts_are_stored() -> None:
    """A removed model whose drain time ended meanwhile released its memory, but its engine ran on."""
    async with living() as stage:
        stage.instance.set_before_end(_never_done)
        stops = stage.backend.stops
        stopping = await stage.begin(stage.instance.stop())
        await stage.leave(stopping)
        assert stage.backend.stops == stops + 1


async def test_every_lifecycle_phase_is_reported_immediately() -> None:
    async with living(loads=False) as stage:
        stage.backend.loaded.set()
        await stage.settle()
        assert stage.instance.loader.context_tokens == 512
        await stage.die()
    told = [Phase.LOADING, Phase.READY, Phase.STOPPING, Phase.LOADING, Phase.READY, Phase.STOPPING, Phase.IDLE]
    assert stage.told == told
    assert stage.instance.restart_log.last_detail == "signal SIGKILL"
    assert stage.instance.restart_count == 1


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        ("loading", Reason.BACKEND_NOT_READY),
        ("draining", Reason.SHUTTING_DOWN),
        ("full", Reason.NO_SLOT_AVAILABLE),
    ],
)
async def test_refused_request_has_the_reason(prepare: str, reason: Reason) -> None:
    stage = Stage()
    await stage.instance.start()
    if prepare != "loading":
        stage.backend.loaded.set()
    await stage.settle()
    if prepare == "draining":
        stage.instance.drain()
    with ExitStack() as held:
        for request in ("r1", "r2") if prepare == "full" else ():
            held.enter_context(stage.instance.admit(request))
        with pytest.raises(WeftError) as refused, stage.instance.admit("r3"):
            pass
    assert refused.value.reason is reason
    await stage.instance.stop()


async def test_wake_of_a_model_whose_earlier_version_still_ends_is_told_to_come_again() -> None:
    """It was told that the runner is stopping, which it was not."""
    stage = Stage()
    with pytest.raises(WeftError, match="once its earlier version has ended") as refused:
        await stage.instance.wake()
    assert (refused.value.reason, refused.value.retry_after_seconds) == (Reason.BACKEND_NOT_READY, 1.0)


async def test_stop_ends_the_backend_in_any_state_and_is_idempotent() -> None:
    stage = Stage()
    await stage.instance.start()
    await stage.settle()
    await stage.instance.stop()
    await stage.instance.stop()
    assert stage.backend.stops == 1
    assert stage.instance.phase is Phase.IDLE
