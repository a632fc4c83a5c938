"""The conformance suite of RouterPort implementations, as tests to inherit.

class TestMyPlacement(PlacementConformance):
    @asynccontextmanager
    async def placement(self, slots: int) -> AsyncGenerator[RouterPort]: ...

    @asynccontextmanager
    async def sleeping_placement(self, wake_error: WeftError | None) -> AsyncGenerator[RouterPort]: ...
"""
# ruff: noqa: D102 (test names are sentences)

import asyncio
import weakref
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1.placement_service_pb2 import Granted
from weft.dispatch.placement import Decision, Placement, RouterPort
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest, PoolQueue
from weft.kernel.requests.request_values import Operation, Priority

__all__ = ["MEMBER", "POOL", "PlacementConformance"]

POOL = "pool"
"""The pool of the implementation under test: one model on each of the runners "a" and "b"."""
MEMBER = "m-a"
"""The name of the model on the runner "a"."""
NOTICE_SECONDS = 5.0


class PlacementConformance:
    """Inherit, override both methods that raise NotImplementedError, and let pytest collect the subclass."""

    def placement(self, slots: int) -> AbstractAsyncContextManager[RouterPort]:
        """Yields a port over a new scheduler with queue depth 1 per runner; each runner has `slots` slots."""
        raise NotImplementedError

    def sleeping_placement(self, wake_error: WeftError | None) -> AbstractAsyncContextManager[RouterPort]:
        """Yields a port with a sleeping pool. Every wake ends immediately, with the error or with the pool ready."""
        raise NotImplementedError

    async def test_a_free_slot_is_granted_with_all_that_a_dispatcher_needs(self) -> None:
        async with self.placement(slots=1) as port, port.place(_request("r1")) as place:
            grant = await _grant(place)
            assert grant.runner in {"a", "b"}
            assert grant.attempt == 1
            assert grant.ticket.claims
            assert len(grant.ticket.mac) == 32
            assert grant.address
            assert grant.runner_incarnation
            assert grant.priority == Priority.NORMAL.wire

    async def test_a_full_pool_is_waited_for_and_a_finished_request_makes_room(self) -> None:
        async with (
            self.placement(slots=1) as port,
            port.place(_request("r1")) as one,
            port.place(_request("r2")) as two,
        ):
            held = {(await _grant(one)).runner, (await _grant(two)).runner}
            assert held == {"a", "b"}
            async with port.place(_request("r3")) as waiting:
                decision = await _next(waiting)
                assert decision.HasField("queued")
                assert decision.queued.position == 1
                assert decision.queued.reason
                await one.report_finished(Reason.UNSPECIFIED)
                assert (await _next(waiting)).HasField("granted")

    async def test_the_length_of_a_queue_is_reported(self) -> None:
        async with self.placement(slots=1) as port, port.place(_request("r1")) as one:
            await _grant(one)
            async with port.place(_request("r2")) as two, port.place(_request("r3")) as three:
                await _grant(two)
                assert (await _next(three)).HasField("queued")
                (queue,) = await port.queues()
                assert queue.average_wait_seconds is not None, "two were placed"
                assert 0.0 <= queue.average_wait_seconds < NOTICE_SECONDS
                expected = PoolQueue(pool=POOL, waiting=1, max_waiting=2, running=2)
                assert replace(queue, average_wait_seconds=None) == expected

    async def test_a_quote_names_the_places_and_accepts_nothing(self) -> None:
        async with self.placement(slots=1) as port:
            quotes = await port.quote(_request("r1"))
            assert {quote.runner for quote in quotes} == {"a", "b"}
            assert all(
                quote.first_token.p50.ToNanoseconds() <= quote.first_token.p90.ToNanoseconds() for quote in quotes
            )
            (queue,) = await port.queues()
            assert (queue.waiting, queue.running) == (0, 0)

    async def test_leaving_the_placement_frees_its_slot_without_a_report(self) -> None:
        async with self.placement(slots=1) as port, port.place(_request("r1")) as one:
            await _grant(one)
            async with port.place(_request("r2")) as two:
                await _grant(two)
            async with port.place(_request("r3")) as three:
                assert (await _final_decision(three)).HasField("granted")

    async def test_the_report_of_an_end_frees_the_slot(self) -> None:
        async with self.placement(slots=1) as port, port.place(_request("r1")) as one:
            await _grant(one)
            async with port.place(_request("r2")) as two:
                await _grant(two)
                await two.report_finished(Reason.UNSPECIFIED, receipt_pb2.Receipt())
                async with port.place(_request("r3")) as three:
                    assert (await _final_decision(three)).HasField("granted")

    async def test_a_failed_attempt_is_granted_elsewhere_with_the_next_number(self) -> None:
        async with self.placement(slots=1) as port, port.place(_request("r1")) as place:
            first = await _grant(place)
            await place.report_attempt_failed(first.attempt, Reason.SERVER_DIED)
            second = await _grant(place)
            assert (first.attempt, second.attempt) == (1, 2)
            assert first.runner != second.runner
            assert first.ticket.mac != second.ticket.mac

    async def test_a_failure_everywhere_ends_the_placement_with_its_reason(self) -> None:
        async with self.placement(slots=1) as port, port.place(_request("r1")) as place:
            for _ in range(2):
                grant = await _grant(place)
                await place.report_attempt_failed(grant.attempt, Reason.SERVER_DIED)
            assert (await _refusal(place)).reason is Reason.SERVER_DIED

    async def test_a_pause_longer_than_the_request_may_wait_ends_the_placement(self) -> None:
        async with self.placement(slots=1) as port, port.place(_request("r1")) as place:
            for _ in range(2):
                grant = await _grant(place)
                await place.report_attempt_failed(grant.attempt, Reason.RATE_LIMIT_EXCEEDED, "limit", 3_600.0)
            assert (await _refusal(place)).reason is Reason.RATE_LIMIT_EXCEEDED

    async def test_an_unknown_model_is_refused_by_name(self) -> None:
        async with self.placement(slots=1) as port, port.place(_request("r1", model="nobody")) as place:
            refusal = await _refusal(place)
            assert refusal.reason is Reason.MODEL_NOT_FOUND
            assert "nobody" in refusal.message

    async def test_a_full_queue_is_refused_with_a_retry_delay(self) -> None:
        async with (
            self.placement(slots=0) as port,
            port.place(_request("r1")) as one,
            port.place(_request("r2")) as two,
            port.place(_request("r3")) as three,
        ):
            assert (await _next(one)).HasField("queued")
            assert (await _next(two)).HasField("queued")
            refusal = await _refusal(three)
            assert refusal.reason is Reason.QUEUE_FULL
            assert refusal.retry_after_seconds is not None

    async def test_a_request_placed_again_keeps_its_age_and_its_used_attempts(self) -> None:
        async with self.placement(slots=1) as port:
            async with port.place(_request("r1")) as one, port.place(_request("r2")) as two:
                await _grant(one)
                await _grant(two)
                async with port.place(_request("young")) as young, port.place(_request("old", age_seconds=9.0)) as old:
                    assert (await _next(young)).HasField("queued")
                    assert (await _next(old)).HasField("queued")
                    await one.report_finished(Reason.UNSPECIFIED)
                    assert (await _final_decision(old)).HasField("granted")
            async with port.place(_request("again", attempts_used=1)) as again:
                assert (await _grant(again)).attempt == 2

    async def test_the_name_of_a_member_stands_for_its_pool(self) -> None:
        async with (
            self.placement(slots=1) as port,
            port.place(_request("r1", model=MEMBER)) as one,
            port.place(_request("r2", model=MEMBER)) as two,
        ):
            assert {(await _grant(one)).runner, (await _grant(two)).runner} == {"a", "b"}

    async def test_a_sleeping_pool_reports_its_wake_and_then_grants(self) -> None:
        async with self.sleeping_placement(None) as port, port.place(_request("r1")) as place:
            decision = await _next(place)
            assert decision.HasField("loading")
            assert decision.loading.stage.startswith("waking ")
            assert (await _final_decision(place)).HasField("granted")

    async def test_a_failed_wake_is_refused_with_its_error(self) -> None:
        error = WeftError(Reason.WAKE_FAILED, "the machine is locked away")
        async with self.sleeping_placement(error) as port, port.place(_request("r1")) as place:
            refusal = await _refusal(place)
            assert refusal.reason is Reason.WAKE_FAILED
            assert error.message in refusal.message

    async def test_an_ended_placement_does_not_keep_its_dispatcher_in_memory(self) -> None:
        """The callback refers to the request, and that to its placement: a cycle would delay freeing them."""
        async with self.placement(slots=1) as port:
            async with port.place(_request("r-1")) as place:
                await _grant(place)
                dispatcher = _Dispatcher()
                place.watch_cancellation(dispatcher.cancel)
                held = weakref.ref(dispatcher)
                del dispatcher
                assert held() is not None
            assert held() is None

    async def test_reports_after_the_end_are_harmless(self) -> None:
        async with self.placement(slots=1) as port, port.place(_request("r1")) as place:
            grant = await _grant(place)
            await place.report_first_content(grant.attempt)
            await place.report_finished(Reason.UNSPECIFIED)
            await place.report_finished(Reason.UNSPECIFIED)
            await place.report_attempt_failed(grant.attempt, Reason.SERVER_DIED)


class _Dispatcher:
    def cancel(self, error: WeftError) -> None:
        """Is not called."""


def _request(request_id: str, **changes: Any) -> PlacementRequest:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "tenant": "default",
        "model": POOL,
        "operation": Operation.CHAT,
        **changes,
    }
    return PlacementRequest(**fields)


async def _next(place: Placement) -> Decision:
    async with asyncio.timeout(NOTICE_SECONDS):
        return await place.next_decision()


async def _final_decision(place: Placement) -> Decision:
    """Returns the grant: before it, a transport may still deliver older decisions about waiting."""
    while not (decision := await _next(place)).HasField("granted"):
        pass
    return decision


async def _grant(place: Placement) -> Granted:
    decision = await _final_decision(place)
    assert decision.HasField("granted"), f"expected a grant, got {decision}"
    return decision.granted


async def _refusal(place: Placement) -> WeftError:
    try:
        decision = await _final_decision(place)
    except WeftError as error:
        return error
    raise AssertionError(f"expected a refusal, got {decision}")
