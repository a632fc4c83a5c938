"""A fault in the router's own code fails one request, and neither the others nor the loop."""

import asyncio
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from waker_harness import MODEL, WakingMesh, grant_of, next_word, refusal_of, waking_mesh

from router_svc.loop import TICK_SECONDS, Mailbox
from router_svc.policy.decisions import Decision, Placed
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch import placement
from weft.dispatch.fleet import FleetView
from weft.kernel.errors.reasons import Reason

FAULT = "a fault that was planted"


async def ready_mesh(stack: AsyncExitStack, tmp_path: Path) -> WakingMesh:
    mesh = await stack.enter_async_context(waking_mesh(tmp_path))
    mesh.show(InstanceState.PHASE_READY)
    return mesh


async def test_grant_that_cannot_be_signed_loses_neither_other_decisions_nor_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(waking_mesh(tmp_path))
        office = mesh.loop._deps.tickets
        sign = office.grant

        def grant(placed: Placed, mailbox: Mailbox, view: FleetView) -> placement.Decision:
            if mailbox.request.spec.request_id == "r0":
                raise KeyError(FAULT)
            return sign(placed, mailbox, view)

        monkeypatch.setattr(office, "grant", grant)
        unlucky, lucky = [await stack.enter_async_context(mesh.place(f"r{number}")) for number in range(2)]
        for place in (unlucky, lucky):
            await next_word(place)
        await mesh.runner.asked()
        mesh.runner.answer()
        mesh.show(InstanceState.PHASE_READY)
        assert (await grant_of(lucky)).model == MODEL
        refused = await refusal_of(unlucky)
        assert refused.reason is Reason.INTERNAL
        assert FAULT not in refused.message
        assert mesh.loop.scheduler.running == 2
        await unlucky.__aexit__(None, None, None)
        assert mesh.loop.scheduler.running == 1


async def test_failed_tick_does_not_stop_later_ticks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with waking_mesh(tmp_path) as mesh, mesh.place() as place:
        await next_word(place)
        scheduler = mesh.loop.scheduler
        tick, ticks = scheduler.tick, asyncio.Event()
        faults = iter([RuntimeError(FAULT)])

        def failing_tick(now: float) -> list[Decision]:
            with suppress(StopIteration):
                raise next(faults)
            ticks.set()
            return tick(now)

        monkeypatch.setattr(scheduler, "tick", failing_tick)
        async with asyncio.timeout(20 * TICK_SECONDS):
            await ticks.wait()


async def test_wake_that_cannot_start_rejects_its_waiters_and_the_next_one_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with waking_mesh(tmp_path) as mesh:
        with monkeypatch.context() as faulty:

            def begin(*_: object) -> None:
                raise RuntimeError(FAULT)

            faulty.setattr(mesh.waker, "begin", begin)
            async with mesh.place("r0") as place:
                assert (await refusal_of(place)).reason is Reason.WAKE_FAILED
        async with mesh.place("r1") as place:
            await next_word(place)
            assert await mesh.runner.asked() == MODEL


async def test_request_that_cannot_be_admitted_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        mesh = await ready_mesh(stack, tmp_path)
        with monkeypatch.context() as faulty:

            def _place_directly(*_: object) -> None:
                raise RuntimeError(FAULT)

            faulty.setattr(mesh.loop.scheduler, "_place_directly", _place_directly)
            async with mesh.place("r0") as place:
                with pytest.raises(RuntimeError, match=FAULT):
                    await place.next_decision()
        assert (mesh.loop.scheduler.waiting, mesh.loop.scheduler.running, mesh.loop._mailboxes) == (0, 0, {})
        assert len(mesh.loop._deps.records.requests._under_way) == 0
        async with mesh.place("r1") as place:
            assert (await grant_of(place)).model == MODEL


@pytest.mark.parametrize(
    ("reason", "counts"), [(Reason.SERVER_DIED, True), (Reason.CANCELLED, False), (Reason.UNSPECIFIED, False)]
)
async def test_only_answers_broken_off_by_the_runner_count_against_it(
    tmp_path: Path, reason: Reason, counts: bool
) -> None:
    async with waking_mesh(tmp_path) as mesh:
        mesh.show(InstanceState.PHASE_READY)
        async with mesh.place("first") as place:
            granted = await grant_of(place)
            await place.report_first_content(granted.attempt)
            await place.report_finished(reason)
        index = mesh.loop.scheduler._index
        candidate = index.table.candidate(MODEL)
        assert candidate is not None
        assert index.health.is_clean(candidate, mesh.clock.monotonic()) is not counts
        async with mesh.place("second") as place:
            assert (await next_word(place)).HasField("granted"), "there is no other runner to go to meanwhile"
