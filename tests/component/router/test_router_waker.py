"""Wakes carried out: runners called over gRPC, recipes run, the view watched."""

import asyncio
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from kit.recipes import command_recipe, packet_recipe, wake_plan
from kit.traces import collected
from waker_harness import MODEL, RUNNER, WakingMesh, grant_of, next_word, refusal_of, waking_mesh, waking_runner

from router_svc.waker import MARGIN_SECONDS
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch.fleet import FleetView
from weft.dispatch.placement import Placement
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.tracing import Sampling, TraceContext
from weft.kernel.values.address import RUNNER_KEY, relayed_address
from weft_testing.fake_clock import let_all_run

PACKET = packet_recipe(mac_address="02:00:00:00:00:01")

BY_MESH = wake_plan(by_runner=False, by_mesh=PACKET, max_wait_seconds=120.0)

BY_BOTH = wake_plan(by_runner=True, by_mesh=PACKET, max_wait_seconds=120.0)

GONE = {"active": False}


async def waiting_places(stack: AsyncExitStack, mesh: WakingMesh, count: int) -> list[Placement]:
    """Requests that have heard that the model wakes."""
    places = [await stack.enter_async_context(mesh.place(f"r{number}")) for number in range(count)]
    for place in places:
        word = await next_word(place)
        assert word.HasField("loading")
        assert word.loading.stage.startswith(f"waking {MODEL} on {RUNNER} ")
    return places


async def test_runner_error_reaches_all_waiters_and_the_next_request_retries(tmp_path: Path) -> None:
    async with waking_mesh(tmp_path) as mesh, AsyncExitStack() as stack:
        places = await waiting_places(stack, mesh, 3)
        await mesh.runner.asked()
        mesh.runner.answer(WeftError(Reason.WAKE_FAILED, "the recipe's program ended with exit code 3"))
        refusals = [await refusal_of(place) for place in places]
        assert {refusal.reason for refusal in refusals} == {Reason.WAKE_FAILED}
        assert all("exit code 3" in refusal.message for refusal in refusals)
        await waiting_places(stack, mesh, 1)
        assert await mesh.runner.asked() == MODEL


async def test_relayed_runner_is_called_through_its_relay(tmp_path: Path) -> None:
    async with waking_mesh(tmp_path) as mesh, AsyncExitStack() as stack:
        mesh.show(InstanceState.PHASE_HIBERNATING, runner={"address": relayed_address(mesh.runner.address, RUNNER)})
        await waiting_places(stack, mesh, 1)
        await mesh.runner.asked()
        assert mesh.runner.calls[0][1][RUNNER_KEY] == RUNNER


async def test_host_woken_by_the_mesh_serves_with_its_new_incarnation(tmp_path: Path) -> None:
    async with waking_mesh(tmp_path, plan=BY_BOTH) as mesh, AsyncExitStack() as stack:
        mesh.show(InstanceState.PHASE_HIBERNATING, runner=GONE)
        (place,) = await waiting_places(stack, mesh, 1)
        await mesh.wait_for_sleepers(1)
        mesh.show(InstanceState.PHASE_HIBERNATING, runner={"active": True, "incarnation": "second"})
        await mesh.runner.asked()
        mesh.runner.answer()
        mesh.show(InstanceState.PHASE_READY)
        assert (await grant_of(place)).runner_incarnation == "second"
        assert mesh.recipes.ran == [PACKET]
        assert mesh.recipes.seconds == [120.0]


async def test_runner_that_cannot_wake_the_model_is_not_called(tmp_path: Path) -> None:
    async with waking_mesh(tmp_path, plan=BY_MESH) as mesh, AsyncExitStack() as stack:
        (place,) = await waiting_places(stack, mesh, 1)
        await mesh.wait_for_sleepers(1)
        mesh.show(InstanceState.PHASE_READY)
        await grant_of(place)
        assert (mesh.recipes.ran, mesh.runner.calls) == ([PACKET], [])


async def test_running_runner_is_called_before_its_host_is_woken(tmp_path: Path) -> None:
    async with waking_mesh(tmp_path, plan=BY_BOTH) as mesh, AsyncExitStack() as stack:
        await waiting_places(stack, mesh, 1)
        await mesh.runner.asked()
        assert mesh.recipes.ran == []


async def test_host_that_fell_asleep_unnoticed_is_woken_and_its_runner_retried(tmp_path: Path) -> None:
    late = tmp_path / "late.sock"
    async with waking_mesh(tmp_path, plan=BY_BOTH) as mesh, AsyncExitStack() as stack:
        mesh.show(InstanceState.PHASE_HIBERNATING, runner={"address": f"unix:{late}"})
        (place,) = await waiting_places(stack, mesh, 1)
        await mesh.wait_for_sleepers(2)
        assert mesh.recipes.ran == [PACKET]
        runner = await stack.enter_async_context(waking_runner(late))
        asked = asyncio.create_task(runner.asked())
        while not asked.done():
            await mesh.clock.advance(0.1)
            await asyncio.sleep(0.01)
        runner.answer()
        mesh.show(InstanceState.PHASE_READY)
        await grant_of(place)
        assert mesh.recipes.ran == [PACKET]
        asked.result()


async def test_model_that_fell_asleep_again_unseen_is_woken_again(tmp_path: Path) -> None:
    async with waking_mesh(tmp_path) as mesh, AsyncExitStack() as stack:
        (place,) = await waiting_places(stack, mesh, 1)
        await mesh.runner.asked()
        mesh.runner.answer()
        await mesh.wait_for_sleepers(2)
        await mesh.clock.advance(1.0)
        mesh.show(InstanceState.PHASE_HIBERNATING, detail="idle again")
        await mesh.wait_for_sleepers(2)
        await mesh.clock.advance(1.0, sleepers=1)
        await mesh.clock.advance(1.0)
        await mesh.runner.asked()
        mesh.show(InstanceState.PHASE_LOADING)
        mesh.show(InstanceState.PHASE_READY)
        mesh.runner.answer()
        await grant_of(place)


async def test_model_that_is_replaced_while_it_wakes_serves_once_it_is_loaded_as_it_is_now(tmp_path: Path) -> None:
    """A reload of the configuration failed the requests that waited: "the runner is stopping"."""
    async with waking_mesh(tmp_path) as mesh, AsyncExitStack() as stack:
        (place,) = await waiting_places(stack, mesh, 1)
        await mesh.runner.asked()
        mesh.runner.answer(WeftError(Reason.SHUTTING_DOWN, "the runner is stopping"))
        await mesh.wait_for_sleepers(2)
        mesh.show(InstanceState.PHASE_LOADING)
        mesh.show(InstanceState.PHASE_READY)
        assert (await grant_of(place)).runner == RUNNER


async def test_wake_missing_in_the_registry_ends_by_the_runner_report(tmp_path: Path) -> None:
    async with waking_mesh(tmp_path) as mesh, AsyncExitStack() as stack:
        (place,) = await waiting_places(stack, mesh, 1)
        await mesh.runner.asked()
        mesh.runner.answer()
        await mesh.wait_for_sleepers(2)
        await mesh.clock.advance(2.0)
        await mesh.runner.asked()
        mesh.runner.answer()
        assert (await grant_of(place)).runner == RUNNER
        assert (await grant_of(await stack.enter_async_context(mesh.place("later")))).runner == RUNNER
        assert len(mesh.runner.calls) == 2


async def test_command_does_not_run_unless_the_router_allows_commands(tmp_path: Path) -> None:
    command = wake_plan(by_runner=False, by_mesh=command_recipe(argv=("poweron", "s3cret")))
    async with waking_mesh(tmp_path, plan=command) as mesh, AsyncExitStack() as stack:
        (place,) = await waiting_places(stack, mesh, 1)
        refusal = await refusal_of(place)
        assert refusal.reason is Reason.WAKE_FAILED
        assert "router.wake_recipes does not allow recipes of type command" in refusal.message
        assert "add command to it" in refusal.message
        assert "s3cret" not in refusal.message
        assert mesh.recipes.ran == []


async def test_command_runs_if_the_router_allows_commands(tmp_path: Path) -> None:
    recipe = command_recipe(argv=("poweron",))
    plan = wake_plan(by_runner=False, by_mesh=recipe)
    async with (
        waking_mesh(tmp_path, plan=plan, allowed_recipes=frozenset({"command"})) as mesh,
        AsyncExitStack() as stack,
    ):
        (place,) = await waiting_places(stack, mesh, 1)
        await mesh.wait_for_sleepers(1)
        mesh.show(InstanceState.PHASE_READY)
        await grant_of(place)
        assert mesh.recipes.ran == [recipe]


@pytest.mark.parametrize(
    ("error", "shown"),
    [(WeftError(Reason.WAKE_FAILED, "s3cret"), True), (ValueError("s3cret"), False)],
)
async def test_failed_wake_has_its_cause_and_an_unexpected_error_is_not_shown(
    tmp_path: Path, error: Exception, shown: bool
) -> None:
    async with waking_mesh(tmp_path, plan=BY_MESH) as mesh, AsyncExitStack() as stack:
        mesh.recipes.error = error
        (place,) = await waiting_places(stack, mesh, 1)
        refusal = await refusal_of(place)
        assert refusal.reason is Reason.WAKE_FAILED
        assert ("s3cret" in refusal.message) is shown


async def test_wake_times_out(tmp_path: Path) -> None:
    async with waking_mesh(tmp_path) as mesh, AsyncExitStack() as stack:
        (place,) = await waiting_places(stack, mesh, 1)
        await mesh.runner.asked()
        await mesh.clock.advance(60.0 + MARGIN_SECONDS - 0.1, sleepers=1)
        assert not mesh.runner.cancelled.is_set()
        await mesh.clock.advance(0.1)
        assert "within 60 s" in (await refusal_of(place)).message
        async with asyncio.timeout(5):
            await mesh.runner.cancelled.wait()


async def test_runner_that_gives_up_at_the_limit_of_a_wake_still_reports_the_cause(tmp_path: Path) -> None:
    async with waking_mesh(tmp_path) as mesh, AsyncExitStack() as stack:
        (place,) = await waiting_places(stack, mesh, 1)
        await mesh.runner.asked()
        await mesh.clock.advance(60.0, sleepers=1)
        mesh.runner.answer(WeftError(Reason.WAKE_FAILED, "it was not ready within 60 s: its recipe had not ended"))
        assert "its recipe had not ended" in (await refusal_of(place)).message


async def test_request_waits_for_the_return_of_a_lost_runner_that_alone_can_wake_its_model(tmp_path: Path) -> None:
    async with waking_mesh(tmp_path) as mesh, AsyncExitStack() as stack:
        mesh.show(InstanceState.PHASE_HIBERNATING, runner={"address": f"unix:{tmp_path / 'nowhere.sock'}"})
        (place,) = await waiting_places(stack, mesh, 1)
        await mesh.until_no_wake_is_under_way()
        back = {"address": mesh.runner.address, "incarnation": "second"}
        mesh.show(InstanceState.PHASE_HIBERNATING, runner=back)
        await mesh.runner.asked()
        mesh.runner.answer()
        mesh.show(InstanceState.PHASE_READY)
        assert (await grant_of(place)).runner == RUNNER


async def test_lost_runner_that_does_not_return_fails_the_requests_that_wait_for_its_wake(tmp_path: Path) -> None:
    async with waking_mesh(tmp_path) as mesh, AsyncExitStack() as stack:
        mesh.show(InstanceState.PHASE_HIBERNATING, runner={"address": f"unix:{tmp_path / 'nowhere.sock'}"})
        (place,) = await waiting_places(stack, mesh, 1)
        await mesh.until_no_wake_is_under_way()
        mesh.show(InstanceState.PHASE_HIBERNATING, runner=GONE)
        assert (await refusal_of(place)).reason is Reason.NO_RUNNER_AVAILABLE


async def test_backend_start_failure_fails_the_wake_with_the_runner_message(tmp_path: Path) -> None:
    async with waking_mesh(tmp_path, plan=BY_MESH) as mesh, AsyncExitStack() as stack:
        mesh.show(InstanceState.PHASE_HIBERNATING, runner=GONE)
        (place,) = await waiting_places(stack, mesh, 1)
        await mesh.wait_for_sleepers(1)
        mesh.show(InstanceState.PHASE_FAILED, runner={"active": True}, detail="the model file is damaged")
        assert "the model file is damaged" in (await refusal_of(place)).message


async def test_deleting_a_waking_model_ends_its_wake(tmp_path: Path) -> None:
    async with waking_mesh(tmp_path, plan=BY_MESH) as mesh, AsyncExitStack() as stack:
        (place,) = await waiting_places(stack, mesh, 1)
        await mesh.wait_for_sleepers(1)
        mesh.tell(FleetView(99, {}, {}))
        assert (await refusal_of(place)).reason is Reason.MODEL_NOT_FOUND
        await mesh.until_no_wake_is_under_way()


async def test_wake_outlives_its_requests_and_serves_the_next_one(tmp_path: Path) -> None:
    async with waking_mesh(tmp_path) as mesh:
        async with AsyncExitStack() as stack:
            await waiting_places(stack, mesh, 2)
            await mesh.runner.asked()
        async with AsyncExitStack() as stack:
            (place,) = await waiting_places(stack, mesh, 1)
            mesh.runner.answer()
            mesh.show(InstanceState.PHASE_READY)
            await grant_of(place)
        assert len(mesh.runner.calls) == 1
        assert not mesh.runner.cancelled.is_set()


async def test_stopping_router_rejects_waiting_requests_and_ends_the_wake(tmp_path: Path) -> None:
    async with waking_mesh(tmp_path) as mesh, AsyncExitStack() as stack:
        (place,) = await waiting_places(stack, mesh, 1)
        await mesh.runner.asked()
        mesh.loop.close()
        await mesh.waker.stop()
        assert (await refusal_of(place)).reason is Reason.SERVICE_UNAVAILABLE
        async with asyncio.timeout(5):
            await mesh.runner.cancelled.wait()
        assert mesh.clock.sleepers == 0


async def test_model_that_woke_on_its_own_needs_no_runner_response(tmp_path: Path) -> None:
    async with waking_mesh(tmp_path) as mesh, AsyncExitStack() as stack:
        (place,) = await waiting_places(stack, mesh, 1)
        await mesh.runner.asked()
        mesh.show(InstanceState.PHASE_READY)
        assert (await grant_of(place)).runner == RUNNER


async def test_runner_that_reported_awake_is_not_called_again_before_its_next_report(tmp_path: Path) -> None:
    async with waking_mesh(tmp_path) as mesh, AsyncExitStack() as stack:
        (place,) = await waiting_places(stack, mesh, 1)
        await mesh.runner.asked()
        mesh.runner.answer()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await mesh.runner.asked()
        assert len(mesh.runner.calls) == 1
        mesh.show(InstanceState.PHASE_READY)
        await grant_of(place)


async def test_abandoned_wake_cancels_its_runner_call_and_rejects_no_request(tmp_path: Path) -> None:
    async with waking_mesh(tmp_path) as mesh, AsyncExitStack() as stack:
        (place,) = await waiting_places(stack, mesh, 1)
        await mesh.runner.asked()
        mesh.waker.give_up(MODEL)
        mesh.waker.give_up("nobody wakes it")
        async with asyncio.timeout(5.0):
            await mesh.runner.cancelled.wait()
        await mesh.until_no_wake_is_under_way()
        await mesh.clock.advance(1.0)
        word = await next_word(place)
        assert word.HasField("queued")
        assert "did not fit on here a moment ago" in word.queued.reason


NO_SHARE = Sampling(ratio=0.0)

REQUEST = TraceContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)

LATER = TraceContext(0x1AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203332, True)


async def wakes(mesh: WakingMesh, place: Placement) -> None:
    """Return once the runner was asked to wake the model for a request."""
    assert (await next_word(place)).HasField("loading")
    assert await mesh.runner.asked() == MODEL


async def ended(mesh: WakingMesh) -> None:
    """Return once the end of the wake was reported."""
    await mesh.until_no_wake_is_under_way()
    await let_all_run()


async def test_wake_starts_its_own_trace_linked_to_its_request(tmp_path: Path) -> None:
    with collected(NO_SHARE) as spans:
        async with waking_mesh(tmp_path, tracing=spans.tracing) as mesh:
            async with mesh.place("r1", REQUEST.traceparent) as place, mesh.place("r2", LATER.traceparent) as other:
                await wakes(mesh, place)
                assert (await next_word(other)).HasField("loading")
                await mesh.clock.advance(7.0)
                mesh.runner.answer()
                mesh.show(InstanceState.PHASE_READY)
                await grant_of(place)
                await grant_of(other)
            await ended(mesh)
            (wake,) = spans.named("weft.wake")
        assert (wake.service, wake.parent_id, wake.is_error) == ("weft-router", "", False)
        assert wake.links == ((f"{REQUEST.trace_id:032x}", f"{REQUEST.span_id:016x}"),)
        assert wake.trace_id not in {f"{REQUEST.trace_id:032x}", f"{LATER.trace_id:032x}"}
        assert (wake.end - wake.start) / 1e9 == pytest.approx(7.0)
        assert wake.attributes["weft.wake.reason"]
        assert {name: value for name, value in wake.attributes.items() if name != "weft.wake.reason"} == {
            "gen_ai.request.model": MODEL,
            "weft.runner": RUNNER,
            "host.name": "here",
            "weft.priority": "normal",
            "weft.outcome": "succeeded",
        }


async def test_failed_wake_of_an_unsampled_request_is_recorded_and_a_successful_one_is_not(tmp_path: Path) -> None:
    unsampled = TraceContext(REQUEST.trace_id, REQUEST.span_id, False).traceparent
    with collected(NO_SHARE) as spans:
        async with waking_mesh(tmp_path, tracing=spans.tracing) as mesh:
            async with mesh.place("r1", unsampled) as place:
                await wakes(mesh, place)
                mesh.runner.answer(WeftError(Reason.WAKE_FAILED, "exit code 3"))
                await refusal_of(place)
            assert [(span.attributes["error.type"], span.is_error) for span in spans.all()] == [("wake_failed", True)]
            async with mesh.place("r2", unsampled) as place:
                await wakes(mesh, place)
                mesh.runner.answer()
                mesh.show(InstanceState.PHASE_READY)
                await grant_of(place)
            await ended(mesh)
            assert len(spans.all()) == 1


async def test_slow_wake_is_recorded(tmp_path: Path) -> None:
    with collected(NO_SHARE) as spans:
        async with waking_mesh(tmp_path, tracing=spans.tracing) as mesh:
            async with mesh.place() as place:
                await wakes(mesh, place)
                await mesh.clock.advance(31.0)
                mesh.runner.answer()
                mesh.show(InstanceState.PHASE_READY)
                await grant_of(place)
            await ended(mesh)
            assert [(span.name, span.links) for span in spans.all()] == [("weft.wake", ())]
