"""Tasks in a mesh of real processes that lose each other."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from mesh_process import eventually, fake_runner
from task_mesh import TaskMesh, Tasks, running_task_mesh, task_service

from tools.torture.history import expected_text
from weft.api.common.v1 import chat_pb2, sampling_pb2
from weft.api.router.v1 import inference_service_pb2, inference_service_pb2_grpc, task_pb2
from weft.durable.requests import RequestClient
from weft.kernel.channels.rpc import open_channel

SLOW, ABSENT, FAST, KEPT = "m-slow", "m-absent", "m-fast", "m-kept"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaskMesh]:
    """With two runners that run, and one that does not."""
    runners = (
        fake_runner("slow", pool="p-slow", answer_tokens=0, tokens_per_second=30),
        fake_runner("absent", pool="p-absent"),
        fake_runner("fast", pool="p-fast", slots=16),
        fake_runner("kept", pool="p-kept", answer_tokens=0, tokens_per_second=30),
    )
    runners[-1]["models"][0]["journal"] = "keep"
    with running_task_mesh(tmp_path_factory.mktemp("tasks"), *runners) as mesh:
        mesh.start("router")
        mesh.start_runner("slow")
        mesh.start_runner("fast")
        mesh.start_runner("kept")
        yield mesh


@pytest.fixture
async def tasks(mesh: TaskMesh) -> AsyncIterator[Tasks]:
    async with task_service(mesh.address) as tasks:
        yield tasks


async def test_task_restarts_and_completes_if_its_runner_is_killed_mid_answer(mesh: TaskMesh, tasks: Tasks) -> None:
    task = (await tasks.submit(40, model=SLOW)).task.id
    await tasks.until_it_says_something(task)
    mesh.end("runner-slow", signal.SIGKILL)
    await asyncio.to_thread(mesh.start_runner, "slow")
    ended, text = await tasks.answer(task)
    attempts = (await tasks.get(task)).attempts
    assert (ended.state, text) == (task_pb2.TASK_STATE_COMPLETED, expected_text(40))
    assert ended.attempt == len(attempts) >= 2
    assert all(attempt.reason for attempt in attempts[:-1])
    assert not attempts[-1].reason


async def _journaled_chat(mesh: TaskMesh, request_id: str, until: asyncio.Event) -> grpc.StatusCode:
    """The code with which a chat of a model that is journaled by setting ends; `until` is set by its first words."""
    question = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text="hi")])
    payload = chat_pb2.ChatPayload(messages=[question], sampling=sampling_pb2.SamplingParams(max_tokens=60))
    async with open_channel(mesh.address) as channel:
        stub: Any = inference_service_pb2_grpc.InferenceServiceStub(channel)
        request = inference_service_pb2.ChatRequest(model=KEPT, payload=payload)
        call = stub.Chat(request, metadata=(("x-request-id", request_id),), timeout=60.0)
        try:
            async for news in call:
                if any(event.HasField("delta") for event in news.events):
                    until.set()
        except grpc.aio.AioRpcError:
            pass
        code: grpc.StatusCode = await call.code()
        return code


@pytest.mark.nightly("kills a runner and a router")
async def test_journaled_chat_survives_killed_runner_and_router_without_its_caller(
    mesh: TaskMesh, tasks: Tasks
) -> None:
    says_something = asyncio.Event()
    asking = asyncio.create_task(_journaled_chat(mesh, "mine-1", says_something))
    await asyncio.wait_for(says_something.wait(), 20.0)
    mesh.end("runner-kept", signal.SIGKILL)
    assert await asking is grpc.StatusCode.UNAVAILABLE, "two answers are never spliced"
    (task,) = await tasks.of_request("mine-1")
    assert task.state in (task_pb2.TASK_STATE_PENDING, task_pb2.TASK_STATE_RUNNING)
    mesh.end("router", signal.SIGKILL)
    await asyncio.to_thread(mesh.start, "router")
    await asyncio.to_thread(mesh.start_runner, "kept")
    ended, text = await tasks.answer(task.id)
    assert (ended.state, text, ended.request_id) == (task_pb2.TASK_STATE_COMPLETED, expected_text(60), "mine-1")
    assert ended.attempt >= 2


async def test_journaled_chat_can_be_cancelled_by_its_request_id_after_the_caller_disconnected(
    mesh: TaskMesh, tasks: Tasks
) -> None:
    says_something = asyncio.Event()
    asking = asyncio.create_task(_journaled_chat(mesh, "mine-2", says_something))
    await asyncio.wait_for(says_something.wait(), 20.0)
    asking.cancel()
    await asyncio.wait([asking])
    (task,) = await tasks.of_request("mine-2")
    assert task.state == task_pb2.TASK_STATE_RUNNING, "it is kept"
    async with open_channel(mesh.address) as channel:
        requests = RequestClient(channel)
        record = await requests.cancel("mine-2", "", "local")
    assert record.cancelled_by

    async def is_cancelled() -> bool:
        (ended,) = await tasks.of_request("mine-2")
        return ended.state == task_pb2.TASK_STATE_CANCELLED

    # Its attempt ends it, a moment after its place among the requests.
    await eventually(is_cancelled, 5.0, "the task is not cancelled")
    await eventually(lambda: mesh.backend_events(task.id, "cancelled"), 5.0, "the backend works on")
