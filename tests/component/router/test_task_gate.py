"""The gate between a grant and a runner: a task is claimed once, with a slot in hand, and never waits with a claim."""

from types import TracebackType
from typing import Self

import pytest
from kit.refusals import refused
from kit.scheduling import placement_request

from router_svc.durable.tasks.task_call import ClaimMissedError, GatedPlacement
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1.placement_service_pb2 import Granted
from weft.dispatch.placement import Decision, OnCancelled, Placement, for_load, in_queue
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest

WAITING = in_queue(1, "every slot is taken")
LOADING = for_load("loading")
REQUEST = placement_request("task-1", tenant="ann")


def grant(attempt: int = 1) -> Decision:
    return Decision(granted=Granted(runner="a", runner_incarnation="1", model="qwen", attempt=attempt))


class Scheduler(Placement):
    """Answers by script, and records the reports."""

    def __init__(self, *words: Decision) -> None:
        self._words = list(words)
        self.told: list[tuple[str, object]] = []
        self.is_left = False

    def place(self, request: PlacementRequest) -> Self:
        assert request == REQUEST
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_left = True

    async def next_decision(self) -> Decision:
        return self._words.pop(0)

    def watch_cancellation(self, on_cancelled: OnCancelled) -> None: ...

    async def report_first_content(self, attempt: int) -> None:
        self.told.append(("content", attempt))

    async def report_attempt_failed(
        self, attempt: int, reason: Reason, message: str = "", retry_after_seconds: float | None = None
    ) -> None:
        self.told.append(("failed", reason))

    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        self.told.append(("finished", reason))
        return True


class Claims:
    """The gate: counts who passes."""

    def __init__(self, error: Exception | None = None) -> None:
        self.count = 0
        self._error = error

    async def __call__(self) -> None:
        self.count += 1
        if self._error is not None:
            raise self._error


async def test_waiting_decisions_claim_nothing_and_the_first_grant_claims_once() -> None:
    scheduler, claims = Scheduler(WAITING, LOADING, grant(1), grant(2)), Claims()
    async with GatedPlacement(scheduler, claims).place(REQUEST) as place:
        assert await place.next_decision() == WAITING
        assert await place.next_decision() == LOADING
        assert claims.count == 0
        assert await place.next_decision() == grant(1)
        await place.report_attempt_failed(1, Reason.SERVER_DIED)
        assert await place.next_decision() == grant(2), "another runner that is free at once belongs to the same claim"
        assert claims.count == 1
        await place.report_first_content(2)
    assert scheduler.told == [("failed", Reason.SERVER_DIED), ("content", 2)]
    assert scheduler.is_left


@pytest.mark.parametrize("error", [ClaimMissedError(), WeftError(Reason.SERVICE_UNAVAILABLE, "no database")])
async def test_failed_claim_frees_the_slot_immediately_and_blames_no_runner(error: WeftError) -> None:
    scheduler = Scheduler(grant())
    async with GatedPlacement(scheduler, Claims(error)).place(REQUEST) as place:
        with pytest.raises(WeftError) as found:
            await place.next_decision()
        assert found.value is error
        assert scheduler.told == [("finished", Reason.CANCELLED)]


@pytest.mark.parametrize("word", [WAITING, LOADING], ids=["waiting", "loading"])
async def test_claim_does_not_wait_for_another_runner(word: Decision) -> None:
    scheduler = Scheduler(grant(), word)
    async with GatedPlacement(scheduler, Claims()).place(REQUEST) as place:
        await place.next_decision()
        await place.report_attempt_failed(1, Reason.CONNECT_FAILED)
        with refused(Reason.CONNECT_FAILED):
            await place.next_decision()


async def test_retried_placement_keeps_its_claim() -> None:
    scheduler, claims = Scheduler(grant(1), grant(2)), Claims()
    gated = GatedPlacement(scheduler, claims)
    async with gated.place(REQUEST) as place:
        await place.next_decision()
    async with gated.place(REQUEST) as place:
        await place.next_decision()
    assert claims.count == 1
