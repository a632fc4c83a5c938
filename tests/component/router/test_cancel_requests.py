"""The cancellation of requests by their ids at a router, for dispatchers inside its process and over gRPC."""

import asyncio
from pathlib import Path

import pytest
from kit.refusals import refused
from kit.scheduling import placement_request as asked
from test_request_log_of_loop import both_ways, router

from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import (
    request_pb2,
    task_pb2,
)
from weft.dispatch.placement import Placement, canceller_of
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason

ENDED = request_pb2.RequestRecord.STATE_ENDED


class Ends:
    """A dispatcher's part: it reports the end of a request as soon as it is cancelled."""

    def __init__(self, place: Placement) -> None:
        self._place = place
        self.error: WeftError | None = None
        self.seen = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __call__(self, error: WeftError) -> None:
        self.error = error
        self._task = asyncio.ensure_future(self._report())

    async def _report(self) -> None:
        receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_CANCELLED, cancelled_by=canceller_of(self.error))
        await self._place.report_finished(Reason.CANCELLED, receipt)
        self.seen.set()


@pytest.mark.parametrize("is_remote", [False, True])
async def test_queued_request_is_cancelled_and_records_who_cancelled_it(tmp_path: Path, is_remote: bool) -> None:
    async with router() as mesh, both_ways(mesh, tmp_path, is_remote=is_remote) as (port, requests):
        first, second = port.place(asked("r-1")), port.place(asked("r-2"))
        async with first, second:
            assert (await first.next_decision()).HasField("granted")
            await second.next_decision()
            cancelling = asyncio.ensure_future(requests.cancel("r-2", "a", "key:k1"))
            with pytest.raises(WeftError) as ended:
                await second.next_decision()
            assert (ended.value.reason, canceller_of(ended.value)) == (Reason.CANCELLED, "key:k1")
            assert not cancelling.done(), "it is the dispatcher that ends the request"
            await second.report_finished(Reason.CANCELLED, receipt_pb2.Receipt(cancelled_by="key:k1"))
            record = await cancelling
    assert (record.state, Reason(record.reason), record.cancelled_by) == (ENDED, Reason.CANCELLED, "key:k1")
    assert (record.message, record.receipt.cancelled_by) == ("cancelled by key:k1", "key:k1")


@pytest.mark.parametrize("is_remote", [False, True])
async def test_running_request_is_notified_of_its_cancellation_and_its_slot_freed(
    tmp_path: Path, is_remote: bool
) -> None:
    async with router() as mesh, both_ways(mesh, tmp_path, is_remote=is_remote) as (port, requests):
        first, second = port.place(asked("r-1")), port.place(asked("r-2"))
        async with first, second:
            assert (await first.next_decision()).HasField("granted")
            await first.report_first_content(1)
            await second.next_decision()
            ends = Ends(first)
            first.watch_cancellation(ends)
            record = await requests.cancel("r-1", "a", "key:k1")
            assert (record.cancelled_by, record.receipt.outcome) == ("key:k1", receipt_pb2.OUTCOME_CANCELLED)
            while not (await second.next_decision()).HasField("granted"):
                pass
            # Once is enough: it has ended, and says how.
            assert (await requests.cancel("r-1", "a", "key:k2")).cancelled_by == "key:k1"
            await ends.seen.wait()


@pytest.mark.parametrize("is_remote", [False, True])
async def test_cancellation_between_grant_and_watch_is_not_lost(tmp_path: Path, is_remote: bool) -> None:
    async with (
        router() as mesh,
        both_ways(mesh, tmp_path, is_remote=is_remote) as (port, requests),
        port.place(asked("r-1")) as place,
    ):
        assert (await place.next_decision()).HasField("granted")
        cancelling = asyncio.ensure_future(requests.cancel("r-1", "a", "key:k1"))
        # Until the router has it.
        while not any(mailbox.cancelled for mailbox in mesh.loop._mailboxes.values()):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        ends = Ends(place)
        place.watch_cancellation(ends)
        await ends.seen.wait()
        assert (await cancelling).cancelled_by == "key:k1"


@pytest.mark.parametrize("is_remote", [False, True])
async def test_failed_attempt_of_a_cancelled_request_is_not_retried(tmp_path: Path, is_remote: bool) -> None:
    async with (
        router() as mesh,
        both_ways(mesh, tmp_path, is_remote=is_remote) as (port, requests),
        port.place(asked("r-1")) as place,
    ):
        assert (await place.next_decision()).HasField("granted")
        heard: asyncio.Future[WeftError] = asyncio.get_running_loop().create_future()
        place.watch_cancellation(heard.set_result)
        cancelling = asyncio.ensure_future(requests.cancel("r-1", "a", "key:k1"))
        await heard
        await place.report_attempt_failed(1, Reason.WORKER_LOST)
        with pytest.raises(WeftError) as ended:
            await place.next_decision()
        assert canceller_of(ended.value) == "key:k1"
        await place.report_finished(Reason.CANCELLED, None)
        assert (await cancelling).cancelled_by == "key:k1"


async def test_answer_completed_before_the_cancellation_is_reported_as_completed() -> None:
    async with router() as mesh, mesh.placement.place(asked("r-1")) as place:
        assert (await place.next_decision()).HasField("granted")
        heard: asyncio.Future[WeftError] = asyncio.get_running_loop().create_future()
        place.watch_cancellation(heard.set_result)
        cancelling = asyncio.ensure_future(mesh.requests.cancel("r-1", "a", "key:k1"))
        await heard
        done = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED)
        await place.report_finished(Reason.UNSPECIFIED, done)
        record = await cancelling
    assert (record.state, record.reason, record.cancelled_by) == (ENDED, 0, "")
    assert record.receipt == done


async def test_dispatcher_that_does_not_end_a_cancelled_request_in_time_loses_its_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router_svc.request_servicer.CANCEL_WAIT_SECONDS", 0.01)
    async with router() as mesh:
        first, second = mesh.placement.place(asked("r-1")), mesh.placement.place(asked("r-2"))
        async with first, second:
            assert (await first.next_decision()).HasField("granted")
            await second.next_decision()
            record = await mesh.requests.cancel("r-1", "a", "key:k1")
            assert (record.state, record.cancelled_by) == (ENDED, "key:k1")
            while not (await second.next_decision()).HasField("granted"):
                pass


async def test_cancellation_completes_and_is_audited_although_its_caller_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router_svc.request_servicer.CANCEL_WAIT_SECONDS", 0.01)
    audited: list[str] = []

    async def audit(record: request_pb2.RequestRecord) -> None:
        audited.append(f"{record.request_id} by {record.cancelled_by}")

    async with router() as mesh:
        monkeypatch.setattr(mesh.servicer, "_audit", audit)
        first, second = mesh.placement.place(asked("r-1")), mesh.placement.place(asked("r-2"))
        async with first, second, asyncio.timeout(10.0):
            assert (await first.next_decision()).HasField("granted")
            await second.next_decision()
            cancelling = asyncio.ensure_future(mesh.requests.cancel("r-1", "a", "key:k1"))
            while not any(mailbox.cancelled for mailbox in mesh.loop._mailboxes.values()):  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)
            cancelling.cancel()
            while not (await second.next_decision()).HasField("granted"):
                pass
    assert audited == ["r-1 by key:k1"]


async def test_tenant_cannot_cancel_another_tenants_request_with_the_same_id() -> None:
    async with router() as mesh:
        mine, theirs = mesh.placement.place(asked("same")), mesh.placement.place(asked("same", tenant="b"))
        async with mine, theirs:
            assert (await mine.next_decision()).HasField("granted")
            await theirs.next_decision()
            with pytest.raises(WeftError) as nobody:
                await mesh.requests.cancel("same", "c", "key:k1")
            assert nobody.value.reason is Reason.NOT_FOUND
            assert "weft get requests" in nobody.value.message
            with pytest.raises(FieldError) as which:
                await mesh.requests.cancel("same", "", "local")
            assert which.value.field == "tenant"
            assert "(a, b)" in which.value.message
            cancelling = asyncio.ensure_future(mesh.requests.cancel("same", "b", "key:k2"))
            with pytest.raises(WeftError):
                await theirs.next_decision()
            await theirs.report_finished(Reason.CANCELLED)
            assert (await cancelling).tenant == "b"
            assert (await mesh.requests.request("same", "a")).state == request_pb2.RequestRecord.STATE_RUNNING


async def test_all_requests_of_a_tenant_with_one_id_are_cancelled() -> None:
    async with router() as mesh:
        first, second = mesh.placement.place(asked("twice")), mesh.placement.place(asked("twice"))
        async with first, second:
            assert (await first.next_decision()).HasField("granted")
            await second.next_decision()
            ends = Ends(first)
            first.watch_cancellation(ends)
            cancelling = asyncio.ensure_future(mesh.requests.cancel("twice", "a", "key:k1"))
            with pytest.raises(WeftError):
                await second.next_decision()
            await second.report_finished(Reason.CANCELLED)
            assert (await cancelling).cancelled_by == "key:k1"
            await ends.seen.wait()


async def test_request_evicted_from_the_log_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async with router() as mesh:
        monkeypatch.setattr(mesh.servicer, "_log", type(mesh.servicer._log)())
        async with mesh.placement.place(asked("r-1")) as place:
            assert (await place.next_decision()).HasField("granted")
            ends = Ends(place)
            place.watch_cancellation(ends)
            record = await mesh.requests.cancel("r-1", "a", "key:k1")
            await ends.seen.wait()
    assert (record.request_id, record.state, record.cancelled_by) == ("r-1", ENDED, "key:k1")


async def test_requested_by_has_a_limit(tmp_path: Path) -> None:
    async with router() as mesh, both_ways(mesh, tmp_path, is_remote=True) as (_, requests):
        with refused(field="requested_by"):
            await requests.cancel("r-1", "a", "x" * 257)


class Journal:
    """Tasks of journaled requests, all pending; it records what is cancelled."""

    def __init__(self, *tasks: task_pb2.Task) -> None:
        self.tasks = list(tasks)
        self.cancelled: list[str] = []

    async def open_of_request(self, request_id: str, tenant: str) -> list[task_pb2.Task]:
        return [task for task in self.tasks if task.request_id == request_id and tenant in ("", task.tenant)]

    async def cancel(self, tenant: str, task_id: str) -> task_pb2.Task:
        self.cancelled.append(task_id)
        return task_pb2.Task(id=task_id, tenant=tenant, state=task_pb2.TASK_STATE_CANCELLED, request_id="mine")


def a_task(name: str, tenant: str = "a") -> task_pb2.Task:
    return task_pb2.Task(id=name, tenant=tenant, state=task_pb2.TASK_STATE_PENDING, request_id="mine")


@pytest.mark.slow("runs whole services")
@pytest.mark.parametrize("is_remote", [False, True])
async def test_journaled_request_is_cancelled_by_its_request_id(tmp_path: Path, is_remote: bool) -> None:
    async with router() as mesh, both_ways(mesh, tmp_path, is_remote=is_remote) as (port, requests):
        journal = Journal(a_task("task-1"))
        mesh.servicer.look_into(journal)
        async with port.place(asked("task-1")) as place:
            place.watch_cancellation(Ends(place))
            assert (await place.next_decision()).HasField("granted")
            assert (await requests.request("mine", "a")).request_id == "task-1"
            record = await requests.cancel("mine", "a", "key:k1")
    assert (record.request_id, record.state, record.cancelled_by) == ("task-1", ENDED, "key:k1")
    assert journal.cancelled == [], "its attempt ends it, with the name of who cancelled it"


async def test_journaled_request_without_a_local_attempt_is_cancelled_by_its_request_id() -> None:
    async with router() as mesh:
        journal = Journal(a_task("task-1"), a_task("task-2"))
        mesh.servicer.look_into(journal)
        record = await mesh.requests.cancel("mine", "a", "key:k1")
    assert (record.state, Reason(record.reason), record.cancelled_by) == (ENDED, Reason.CANCELLED, "key:k1")
    assert journal.cancelled == ["task-1", "task-2"]


async def test_journaled_request_of_another_tenant_is_not_found_and_ambiguous_tenants_are_rejected() -> None:
    async with router() as mesh:
        journal = Journal(a_task("task-1", "a"), a_task("task-2", "b"))
        mesh.servicer.look_into(journal)
        with pytest.raises(WeftError) as unknown:
            await mesh.requests.cancel("mine", "c", "key:k1")
        with pytest.raises(FieldError) as several:
            await mesh.requests.cancel("mine", "", "local")
    assert (unknown.value.reason, several.value.field) == (Reason.NOT_FOUND, "tenant")
    assert journal.cancelled == []


class CompletedMeanwhile(Journal):
    """Tasks that complete before the cancellation."""

    async def cancel(self, tenant: str, task_id: str) -> task_pb2.Task:
        return task_pb2.Task(id=task_id, tenant=tenant, state=task_pb2.TASK_STATE_COMPLETED, request_id="mine")


async def test_journaled_request_that_completed_meanwhile_is_not_reported_as_cancelled() -> None:
    async with router() as mesh:
        mesh.servicer.look_into(CompletedMeanwhile(a_task("task-1")))
        with refused(Reason.NOT_FOUND):
            await mesh.requests.cancel("mine", "a", "key:k1")
