"""A submitter of a torture run, against a service that does what a test says."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError
from grpc_status import rpc_status

from tools.torture.history import Event, EventFile, Kind, read_events
from tools.torture.plan import submission
from tools.torture.submitter import SubmitterOptions, submit
from weft.api.router.v1 import task_pb2, task_service_pb2, task_service_pb2_grpc
from weft.kernel.channels.rpc import error_to_status, new_server
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

SEED = 7
NAME = "s0"
COUNT = 60
PENDING, CANCELLED = task_pb2.TASK_STATE_PENDING, task_pb2.TASK_STATE_CANCELLED


class OneKeyOneTask:
    """Keeps tasks by their keys."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.tasks: dict[str, tuple[str, bytes]] = {}
        self.cancelled: set[str] = set()
        self.sent: list[str] = []
        self.meant: list[bool] = []
        self.failures = 0
        self.forgets = False
        self.refuses = False
        self.says_why = False

    async def SubmitTask(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        """The same key is the same task, with the same body."""
        key, body = request.idempotency_key, request.spec.SerializeToString()
        self.sent.append(key)
        self.meant.append(any(event.kind is Kind.INTENT and event.key == key for event in read_events(self._file)))
        if self.refuses:
            await context.abort(StatusCode.INVALID_ARGUMENT, "no")
        if self.failures:
            self.failures -= 1
            if self.says_why:
                status = error_to_status(WeftError(Reason.SERVICE_UNAVAILABLE, "the database failed"))
                await context.abort_with_status(rpc_status.to_status(status))
            await context.abort(StatusCode.UNAVAILABLE, "killed")
        task, known = self.tasks.setdefault(key, (f"task-{key}", body))
        if known != body:
            await context.abort(StatusCode.ALREADY_EXISTS, "another body")
        return task_service_pb2.SubmitTaskResponse(task=task_pb2.Task(id=task, state=PENDING))

    async def CancelTask(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        """It ends."""
        if self.forgets:
            await context.abort(StatusCode.NOT_FOUND, "no such task")
        self.cancelled.add(request.id)
        return task_service_pb2.CancelTaskResponse(task=task_pb2.Task(id=request.id, state=CANCELLED))

    async def GetTask(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        """As it is."""
        del context
        state = CANCELLED if request.id in self.cancelled else PENDING
        return task_service_pb2.GetTaskResponse(task=task_pb2.Task(id=request.id, state=state))

    async def _unused(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    DeleteTask = ListTasks = WatchTask = WatchTasks = _unused


@asynccontextmanager
async def _served(folder: Path) -> AsyncIterator[tuple[OneKeyOneTask, Callable[[], Awaitable[None]]]]:
    """A service, and what lets a submitter live one life against it."""
    orders = SubmitterOptions(
        seed=SEED,
        name=NAME,
        address=f"unix:{folder}/s.sock",
        file=folder / "s0.jsonl",
        count=COUNT,
        per_second=1e6,
    )
    service, server = OneKeyOneTask(orders.file), new_server()
    task_service_pb2_grpc.add_TaskServiceServicer_to_server(cast("Any", service), server)
    server.add_insecure_port(orders.address)
    await server.start()
    try:
        yield service, lambda: submit(orders)
    finally:
        await server.stop(None)


def _written(folder: Path, *kinds: Kind) -> list[Event]:
    return [event for event in read_events(folder / "s0.jsonl") if event.kind in kinds]


def _planned() -> list[Any]:
    return [submission(SEED, NAME, number) for number in range(COUNT)]


async def test_every_planned_task_is_sent_and_acknowledged_once(tmp_path: Path) -> None:
    async with _served(tmp_path) as (service, live):
        await live()
    planned = _planned()
    assert set(service.tasks) == {each.key for each in planned}
    assert {event.key for event in _written(tmp_path, Kind.ACKED)} == set(service.tasks)
    assert all(service.meant), "something was sent that was not written down before"
    assert len(_written(tmp_path, Kind.REFUSED)) == sum(each.is_contradicted for each in planned)
    asked = {f"task-{each.key}" for each in planned if each.cancel_after_seconds is not None}
    assert service.cancelled == asked
    assert {event.task for event in _written(tmp_path, Kind.CANCEL_ACKED)} == asked


async def test_submission_is_resent_with_its_key_until_acknowledged(tmp_path: Path) -> None:
    async with _served(tmp_path) as (service, live):
        service.failures = 20
        await live()
    assert len(service.sent) == 20 + COUNT + sum(each.is_sent_twice + each.is_contradicted for each in _planned())
    assert len(service.tasks) == COUNT


async def test_restarted_submitter_sends_only_what_was_not_acknowledged(tmp_path: Path) -> None:
    first, second = _planned()[:2]
    file = EventFile(tmp_path / "s0.jsonl", NAME)
    file.write(Kind.INTENT, key=first.key, tokens=first.tokens)
    file.write(Kind.ACKED, key=first.key, task=f"task-{first.key}", state=PENDING)
    file.write(Kind.INTENT, key=second.key, tokens=second.tokens)
    file.close()
    async with _served(tmp_path) as (service, live):
        await live()
        before = len(service.sent)
        await live()
    assert first.key not in service.sent
    assert second.key in service.sent
    assert len(service.sent) == before, "a life with nothing left to do has sent something"


async def test_missing_task_is_recorded(tmp_path: Path) -> None:
    async with _served(tmp_path) as (service, live):
        service.forgets = True
        await live()
    asked = {f"task-{each.key}" for each in _planned() if each.cancel_after_seconds is not None}
    assert {event.task for event in _written(tmp_path, Kind.MISSED)} == asked


async def test_unplanned_rejection_ends_the_submitter(tmp_path: Path) -> None:
    async with _served(tmp_path) as (service, live):
        service.refuses = True
        with pytest.raises(ExceptionGroup) as refused:
            await live()
    assert refused.group_contains(AioRpcError)
    # Also for the checker, which asks for a reason.
    assert {event.note for event in _written(tmp_path, Kind.TURNED_AWAY)} == {"INVALID_ARGUMENT - no"}


@pytest.mark.parametrize("says_why", [True, False])
async def test_rejections_with_a_reason_are_recorded_and_lost_connections_are_not(
    tmp_path: Path, says_why: bool
) -> None:
    async with _served(tmp_path) as (service, live):
        service.failures, service.says_why = 20, says_why
        await live()
    notes = [event.note for event in _written(tmp_path, Kind.TURNED_AWAY)]
    assert notes == ["UNAVAILABLE SERVICE_UNAVAILABLE the database failed"] * (20 if says_why else 0)
