"""A router that dies where what it does is not atomic: what was acknowledged is done, and nothing is done twice."""

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest
from grpc.aio import AioRpcError
from mesh_process import fake_runner
from task_mesh import LEASE_SECONDS, MODEL, TaskMesh, Tasks, running_task_mesh, task_service

from tools.torture.history import Kind, expected_text
from weft.api.common.v1 import error_reason_pb2
from weft.api.router.v1 import task_pb2

TOKENS = 5


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaskMesh]:
    with running_task_mesh(tmp_path_factory.mktemp("tasks"), fake_runner("a")) as mesh:
        mesh.start_runner("a")
        yield mesh


@pytest.fixture
def mesh(services: TaskMesh) -> Iterator[TaskMesh]:
    """Without a router; the one that a test leaves behind is ended."""
    yield services
    with suppress(KeyError):
        services.end("router", signal.SIGKILL)


@pytest.fixture
async def tasks(mesh: TaskMesh) -> AsyncIterator[Tasks]:
    async with task_service(mesh.address) as tasks:
        yield tasks


async def _is_done_once(mesh: TaskMesh, tasks: Tasks, task: str) -> task_pb2.Task:
    """Its end, after a second task has had its turn as well."""
    ended, text = await tasks.answer(task)
    assert (ended.state, text) == (task_pb2.TASK_STATE_COMPLETED, expected_text(TOKENS))
    another = await tasks.submit(TOKENS)
    assert (await tasks.answer(another.task.id))[0].state == task_pb2.TASK_STATE_COMPLETED
    attempts = (await tasks.get(task)).attempts
    assert len(mesh.backend_events(task, "begun")) == 1, attempts
    return ended


async def test_resubmitting_a_stored_but_unacknowledged_task_returns_the_same_task(
    mesh: TaskMesh, tasks: Tasks
) -> None:
    mesh.start_deadly_router("submitted:1")
    with pytest.raises(AioRpcError):
        await tasks.submit(TOKENS, key="submitted", is_once=True)
    mesh.wait_dead()
    mesh.start("router")
    again = await tasks.submit(TOKENS, key="submitted")
    assert again.existed
    assert [task.id for task in await tasks.listed(MODEL)] == [again.task.id]
    await _is_done_once(mesh, tasks, again.task.id)


@pytest.mark.nightly("a matrix of kills in a task")
async def test_claimed_task_that_did_not_start_is_requeued_after_its_lease_expires(
    mesh: TaskMesh, tasks: Tasks
) -> None:
    mesh.start_deadly_router("claimed:1")
    # It may die before it has answered.
    with suppress(AioRpcError):
        await tasks.submit(TOKENS, key="claimed", is_once=True)
    mesh.wait_dead()
    mesh.start("router")
    again = await tasks.submit(TOKENS, key="claimed")
    assert again.existed
    ended = await _is_done_once(mesh, tasks, again.task.id)
    first, second = (await tasks.get(again.task.id)).attempts
    assert ended.attempt == 2
    assert first.reason == error_reason_pb2.ERROR_REASON_WORKER_LOST
    assert (second.claim_time.ToNanoseconds() - first.claim_time.ToNanoseconds()) / 1e9 >= LEASE_SECONDS
    assert first.owner != second.owner


@pytest.mark.nightly("a matrix of kills in a task")
async def test_stored_but_unreported_result_is_final_and_the_task_does_not_rerun(mesh: TaskMesh, tasks: Tasks) -> None:
    mesh.start_deadly_router("ended:1")
    task = (await tasks.submit(TOKENS, key="ended")).task.id
    mesh.wait_dead()
    mesh.start("router")
    ended = await _is_done_once(mesh, tasks, task)
    again = await tasks.submit(TOKENS, key="ended")
    assert (again.existed, again.task) == (True, ended)
    assert ended.attempt == 1
    assert len([event for event in mesh.router_events(Kind.CLAIMED) if event.task == task]) == 1
