"""An instance sleeps and wakes, stepped on a fake clock."""

import asyncio

import pytest
from instance_stage import failure, living, outcome
from kit.failures import expect_failure, fails
from kit.presence import present
from kit.recipes import command_recipe, http_recipe

from runner_svc.instance.instance_settings import SleepSettings
from runner_svc.policy.lifecycle import Phase
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

WAKE = http_recipe(url="http://controller/wake")
SLEEP = command_recipe(argv=("suspend",))
ASLEEP = (Phase.HIBERNATING, "")
AWAY = WeftError(Reason.CONNECT_FAILED, "the server does not answer")


async def test_initially_hibernating_model_is_neither_loaded_nor_failed() -> None:
    async with living(start_asleep=True) as stage:
        assert stage.state == ASLEEP
        assert stage.backend.starts == 0
        assert stage.instance.restart_count == 0
        with fails(Reason.BACKEND_NOT_READY), stage.instance.admit("r"):
            pass


async def test_backend_hibernating_in_process_is_kept_and_woken_by_a_start() -> None:
    async with living(sleep=SleepSettings(after_seconds=30.0)) as stage:
        stage.backend.sleeps_in_place = True
        starts, stops = stage.backend.starts, stage.backend.stops
        await stage.clock.advance(31.0)
        assert stage.state == ASLEEP
        assert stage.backend.stops == stops
        await stage.instance.wake()
        assert (stage.state, stage.backend.starts) == ((Phase.READY, ""), starts + 1)
    assert stage.backend.stops > stops, "the end of the runner ends it"


async def test_unload_ends_the_process_of_a_backend_that_could_hibernate_in_it() -> None:
    async with living() as stage:
        stage.backend.sleeps_in_place = True
        stops = stage.backend.stops
        await stage.instance.unload()
        assert (stage.state, stage.backend.stops) == (ASLEEP, stops + 1)
        await stage.instance.unload()
        assert stage.backend.stops == stops + 1, "nothing is left to be ended"
        await stage.instance.wake()
        assert stage.instance.phase is Phase.READY


async def test_unload_ends_the_process_of_a_backend_hibernating_in_it() -> None:
    async with living(sleep=SleepSettings(after_seconds=30.0)) as stage:
        stage.backend.sleeps_in_place = True
        stops = stage.backend.stops
        await stage.clock.advance(31.0)
        await stage.instance.unload()
        assert (stage.state, stage.backend.stops) == (ASLEEP, stops + 1)
        await stage.instance.wake()
        await stage.clock.advance(31.0)
        assert (stage.state, stage.backend.stops) == (ASLEEP, stops + 1), "its next idle time leaves the process again"


async def test_unload_during_a_wake_of_a_hibernating_process_ends_the_wake_first() -> None:
    async with living(sleep=SleepSettings(after_seconds=30.0)) as stage:
        stage.backend.sleeps_in_place = True
        stops = stage.backend.stops
        await stage.clock.advance(31.0)
        unload, wake = (asyncio.create_task(work) for work in (stage.instance.unload(), stage.instance.wake()))
        assert [await outcome(unload), await outcome(wake)] == [None, None]
        assert (stage.instance.phase, stage.backend.stops) == (Phase.READY, stops + 1)


async def test_unload_keeps_the_process_if_configured() -> None:
    async with living(unload_keeps_process=True) as stage:
        stage.backend.sleeps_in_place = True
        stops = stage.backend.stops
        await stage.instance.unload()
        assert (stage.state, stage.backend.stops) == (ASLEEP, stops)


async def test_twenty_concurrent_wakes_run_the_recipe_once_and_all_succeed() -> None:
    async with living(start_asleep=True, recipe=WAKE) as stage:
        stage.recipes.go.clear()
        wakes = [asyncio.create_task(stage.instance.wake()) for _ in range(20)]
        await stage.settle()
        assert stage.state == (Phase.LOADING, "waking")
        stage.recipes.go.set()
        assert [await outcome(wake) for wake in wakes] == [None] * 20
        assert stage.recipes.done == [WAKE]
        assert stage.instance.phase is Phase.READY


async def test_cancelled_waiter_leaves_the_wake_to_the_others() -> None:
    async with living(start_asleep=True, recipe=WAKE) as stage:
        stage.recipes.go.clear()
        first, second = (asyncio.create_task(stage.instance.wake()) for _ in range(2))
        await stage.settle()
        await stage.leave(first)
        assert first.cancelled()
        stage.recipes.go.set()
        assert await outcome(second) is None
        assert stage.recipes.done == [WAKE]


async def test_failed_wake_reaches_every_waiter_and_the_next_call_retries() -> None:
    async with living(start_asleep=True, recipe=WAKE) as stage:
        stage.recipes.error = WeftError(Reason.WAKE_FAILED, "exit code 3: no power")
        stage.recipes.go.clear()
        wakes = [asyncio.create_task(stage.instance.wake()) for _ in range(3)]
        await stage.settle()
        stage.recipes.go.set()
        errors = [await outcome(wake) for wake in wakes]
        assert [(error.reason, error.message) for error in errors if error] == [
            (Reason.WAKE_FAILED, "exit code 3: no power")
        ] * 3
        assert stage.state == (Phase.HIBERNATING, "exit code 3: no power")
        stage.recipes.error = None
        await stage.instance.wake()
        assert stage.recipes.done == [WAKE] * 2
        assert stage.state == (Phase.READY, "")


async def test_backend_that_dies_during_a_wake_leaves_the_model_hibernating() -> None:
    async with living(start_asleep=True) as stage:
        stage.backend.load_error = WeftError(Reason.SERVER_DIED, "no such file")
        error = await failure(stage.instance.wake())
        assert (error.reason, error.message) == (Reason.WAKE_FAILED, "no such file")
        assert stage.state == (Phase.HIBERNATING, "no such file")
        assert stage.instance.restart_count == 0


async def test_wake_timeout_reports_what_it_waited_for() -> None:
    async with living(start_asleep=True, recipe=WAKE, max_wait_seconds=60.0) as stage:
        stage.recipes.go.clear()
        wake = await stage.begin(stage.instance.wake())
        await stage.clock.advance(59.9)
        assert not wake.done()
        await stage.clock.advance(0.1)
        error = await failure(wake)
        assert error.reason is Reason.WAKE_FAILED
        assert error.message == "it was not ready within 60 s: its recipe had not ended"
        assert stage.instance.phase is Phase.HIBERNATING


async def test_wake_of_a_ready_model_is_a_no_op_and_a_loading_one_is_waited_for() -> None:
    async with living(recipe=WAKE, loads=False) as stage:
        wake = await stage.begin(stage.instance.wake())
        assert not wake.done()
        stage.backend.loaded.set()
        assert await outcome(wake) is None
        await stage.instance.wake()
        assert stage.recipes.done == []
        assert stage.backend.starts == 1


async def test_load_waiters_are_notified_of_a_crash_loop() -> None:
    async with living(
        loads=False, load_error=WeftError(Reason.SERVER_DIED, "bad model"), limits={"max_deaths": 2}
    ) as stage:
        wake = await stage.begin(stage.instance.wake())
        stage.backend.loaded.set()
        for error in (await failure(wake), await failure(stage.instance.wake())):
            assert error.reason is Reason.WAKE_FAILED
            assert "bad model" in error.message


async def test_idle_model_hibernates_after_its_timeout_and_its_process_ends() -> None:
    async with living(sleep=SleepSettings(after_seconds=300.0)) as stage:
        await stage.clock.advance(299.9)
        assert stage.instance.phase is Phase.READY
        await stage.advance(0.1)
        assert stage.state == ASLEEP
        assert stage.backend.stops == 1
        await stage.instance.wake()
        assert stage.backend.starts == 2


async def test_request_keeps_a_model_awake_and_its_end_starts_the_idle_timer() -> None:
    async with living(sleep=SleepSettings(after_seconds=300.0)) as stage:
        await stage.clock.advance(200.0)
        with stage.instance.admit("r"):
            await stage.clock.advance(1050.0)
            assert stage.instance.phase is Phase.READY
        await stage.clock.advance(299.0)
        assert stage.instance.phase is Phase.READY
        await stage.advance(1.0)
        assert stage.state == ASLEEP


async def test_request_during_hibernation_start_is_refused_as_not_ready_and_a_wake_succeeds() -> None:
    async with living(sleep=SleepSettings(after_seconds=10.0, action=SLEEP)) as stage:
        stage.recipes.go.clear()
        await stage.advance(10.0)
        assert stage.state == (Phase.STOPPING, "going to sleep")
        with fails(Reason.BACKEND_NOT_READY), stage.instance.admit("r"):
            pass
        wake = await stage.begin(stage.instance.wake())
        stage.recipes.go.set()
        assert await outcome(wake) is None
        assert Phase.HIBERNATING in stage.told
        assert stage.instance.phase is Phase.READY


async def test_failed_sleep_action_keeps_the_model_serving_and_is_retried() -> None:
    async with living(sleep=SleepSettings(after_seconds=10.0, action=SLEEP)) as stage:
        stage.recipes.error = WeftError(Reason.WAKE_FAILED, "status 500")
        await stage.advance(10.0)
        assert stage.instance.phase is Phase.READY
        assert stage.backend.stops == 0
        await stage.clock.advance(9.0)
        assert len(stage.recipes.done) == 1
        stage.recipes.error = None
        await stage.advance(1.0)
        assert stage.state == ASLEEP
        assert stage.recipes.done == [SLEEP] * 2


async def test_explicitly_loaded_model_does_not_hibernate_until_unloaded() -> None:
    async with living(start_asleep=True, sleep=SleepSettings(after_seconds=10.0)) as stage:
        await stage.instance.load()
        await stage.clock.advance(1000.0)
        assert stage.instance.phase is Phase.READY
        await stage.instance.unload()
        assert stage.state == ASLEEP
        await stage.instance.wake()
        await stage.advance(10.0)
        assert stage.state == ASLEEP


async def test_failed_or_cancelled_concurrent_load_does_not_affect_the_others() -> None:
    async with living(start_asleep=True, recipe=WAKE, sleep=SleepSettings(after_seconds=10.0)) as stage:
        stage.recipes.error = WeftError(Reason.WAKE_FAILED, "no power")
        failed = [asyncio.create_task(stage.instance.load()) for _ in range(2)]
        assert [await outcome(load) is None for load in failed] == [False, False]
        stage.recipes.error = None
        await stage.instance.wake()
        await stage.advance(10.0)
        assert stage.state == ASLEEP, "two loads that failed pinned it"
        stage.recipes.go.clear()
        leaves, stays = (asyncio.create_task(stage.instance.load()) for _ in range(2))
        await stage.settle()
        await stage.leave(leaves)
        stage.recipes.go.set()
        assert await outcome(stays) is None
        await stage.clock.advance(100.0)
        assert stage.instance.phase is Phase.READY, "a load that left took the other's pin with it"


async def test_unload_waits_for_running_requests_up_to_its_timeout() -> None:
    async with living(drain_seconds=30.0) as stage:
        request = await stage.request()
        unload = await stage.begin(stage.instance.unload())
        await stage.clock.advance(29.0)
        assert not unload.done()
        assert not request.done()
        assert stage.backend.stops == 0
        await stage.clock.advance(1.1)
        assert await outcome(unload) is None
        expect_failure(present(await request), Reason.WORKER_RESTARTED)
        assert stage.state == ASLEEP


async def test_unload_ends_a_load_and_a_crash_loop_too() -> None:
    async with living(loads=False, limits={"max_deaths": 1}) as stage:
        await stage.instance.unload()
        assert stage.state == ASLEEP
        stage.backend.loaded.set()
        await stage.instance.wake()
        await stage.die()
        assert stage.instance.phase is Phase.CRASH_LOOP
        await stage.instance.unload()
        assert stage.state == ASLEEP


async def test_unload_with_a_failed_sleep_action_reports_it() -> None:
    async with living(attached=True, recipe=WAKE, sleep=SleepSettings(after_seconds=10.0, action=SLEEP)) as stage:
        stage.recipes.error = WeftError(Reason.WAKE_FAILED, "status 500")
        expect_failure(await failure(stage.instance.unload()), Reason.BACKEND_ERROR, "status 500")
        assert stage.instance.phase is Phase.READY


@pytest.mark.parametrize("sleep", [None, SleepSettings(after_seconds=10.0)])
async def test_attached_server_without_a_sleep_action_cannot_be_unloaded(sleep: SleepSettings | None) -> None:
    async with living(attached=True, sleep=sleep) as stage:
        assert (await failure(stage.instance.unload())).reason is Reason.UNSUPPORTED_OPERATION
        await stage.clock.advance(100.0)
        assert stage.instance.phase is Phase.READY


async def test_wakeable_attached_server_missing_at_startup_hibernates() -> None:
    async with living(attached=True, recipe=WAKE, max_wait_seconds=10.0, load_error=AWAY) as stage:
        assert stage.state == (Phase.HIBERNATING, "the server does not answer")
        wake = await stage.begin(stage.instance.wake())
        await stage.clock.advance(3.0)
        stage.backend.load_error = None
        await stage.clock.advance(0.5)
        assert await outcome(wake) is None
        assert stage.recipes.done == [WAKE]


async def test_attached_server_that_comes_up_too_late_is_a_failed_wake() -> None:
    async with living(attached=True, recipe=WAKE, max_wait_seconds=10.0, load_error=AWAY) as stage:
        wake = await stage.begin(stage.instance.wake())
        await stage.clock.advance(10.0)
        error = await failure(wake)
        assert error.message == "it was not ready within 10 s: the server does not answer"
        assert stage.instance.phase is Phase.HIBERNATING


@pytest.mark.parametrize(("by_mesh", "phase"), [(True, Phase.HIBERNATING), (False, Phase.FAILED)])
async def test_non_wakeable_attached_server_is_polled_until_online(by_mesh: bool, phase: Phase) -> None:
    async with living(attached=True, woken_by_mesh=by_mesh, attach_retry_seconds=5.0, load_error=AWAY) as stage:
        assert stage.state == (phase, "the server does not answer")
        await stage.clock.advance(5.0)
        stage.backend.load_error = None
        told = len(stage.told)
        await stage.advance(5.0)
        assert stage.told[told:] == [Phase.READY], "probing in vain is no news"
        assert stage.instance.restart_count == 0


async def test_unexpected_error_fails_the_wake_and_not_the_next_one() -> None:
    async with living(attached=True, start_asleep=True, recipe=WAKE) as stage:
        stage.recipes.error = ValueError("s3cret")
        error = await failure(stage.instance.wake())
        assert error.reason is Reason.WAKE_FAILED
        assert "s3cret" not in error.message
        assert stage.state == (Phase.HIBERNATING, error.message)
        stage.recipes.error = None
        await stage.instance.wake()
        assert stage.state == (Phase.READY, "")


async def test_unexpected_error_during_a_load_counts_as_a_crash() -> None:
    async with living(load_error=ValueError("s3cret"), limits={"max_deaths": 2}) as stage:
        assert stage.instance.phase is Phase.CRASH_LOOP
        assert stage.instance.detail.startswith(
            "an internal error; the runner's log has the details; next start in 10 s;"
        )
        stage.backend.load_error = None
        await stage.clock.advance(10.0)
        assert stage.state == (Phase.READY, "")


async def test_stop_cancels_a_wake_and_notifies_the_waiters() -> None:
    async with living(start_asleep=True, recipe=WAKE) as stage:
        stage.recipes.go.clear()
        wake = await stage.begin(stage.instance.wake())
        await stage.instance.stop()
        expect_failure(await failure(wake), Reason.SHUTTING_DOWN)


async def test_draining_runner_neither_wakes_nor_hibernates_models() -> None:
    async with living(sleep=SleepSettings(after_seconds=10.0)) as stage:
        stage.instance.drain()
        await stage.clock.advance(100.0)
        assert stage.instance.phase is Phase.DRAINING
        assert (await failure(stage.instance.wake())).reason is Reason.SHUTTING_DOWN
