"""Calls of a store in this process: their time limits, and whom they are made as."""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator

import grpc
import pytest

from weft.api.router.v1 import file_service_pb2, task_pb2, task_service_pb2
from weft.durable.batches import FileClient
from weft.durable.requests import RequestClient
from weft.durable.tasks import TaskClient
from weft.kernel.access.principal import LOCAL, Principal
from weft.kernel.access.rpc_auth import as_caller, caller
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


class Slow:
    """Every call takes longer than it may."""

    async def GetTask(self, request: object, context: object) -> None:  # noqa: N802 - the name of the rpc
        await asyncio.sleep(5)

    async def SubmitTask(self, request: object, context: object) -> None:  # noqa: N802 - the name of the rpc
        await asyncio.sleep(5)

    async def WatchTask(  # noqa: N802 - the name of the rpc
        self, request: object, context: object
    ) -> AsyncGenerator[task_service_pb2.WatchTaskResponse]:
        await asyncio.sleep(0.02)
        yield task_service_pb2.WatchTaskResponse(
            task=task_pb2.Task(tenant=caller().name, state=task_pb2.TASK_STATE_PENDING)
        )

    async def UploadFile(  # noqa: N802 - the name of the rpc
        self, requests: AsyncIterator[object], context: object
    ) -> file_service_pb2.UploadFileResponse:
        await asyncio.sleep(0.02)
        return file_service_pb2.UploadFileResponse(
            file=file_service_pb2.File(byte_count=len([1 async for _ in requests]))
        )


async def test_slow_store_call_is_unavailable() -> None:
    with pytest.raises(WeftError, match="task store timed out") as late:
        await TaskClient(Slow(), timeout_seconds=0.01).get("ann", "task-1")
    assert (late.value.reason, late.value.retry_after_seconds) == (Reason.SERVICE_UNAVAILABLE, 2)


async def test_submission_that_timed_out_says_that_a_repetition_without_a_key_may_run_twice() -> None:
    tasks = TaskClient(Slow(), timeout_seconds=0.01)
    for key, hint in (("", "; it may have stored the task: look for it in the list of tasks"), ("k", "")):
        with pytest.raises(WeftError) as late:
            await tasks.submit("ann", task_service_pb2.SubmitTaskRequest(idempotency_key=key))
        assert late.value.reason is Reason.SERVICE_UNAVAILABLE
        assert late.value.message.startswith(f"task store timed out{hint}")
        assert ("list of tasks" in late.value.message) is bool(hint)


async def test_call_on_a_closed_channel_says_that_the_connection_was_lost() -> None:
    channel = grpc.aio.insecure_channel("127.0.0.1:1")
    await channel.close()
    with pytest.raises(WeftError, match="the connection was lost") as closed:
        await RequestClient(channel).clients()
    assert closed.value.reason is Reason.SERVICE_UNAVAILABLE
    with pytest.raises(WeftError, match="the connection was lost"):
        await anext(RequestClient(channel).watch())


async def test_call_during_which_the_channel_is_closed_says_that_the_connection_was_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{silent.getsockname()[1]}")
        call = asyncio.ensure_future(RequestClient(channel).clients())
        await asyncio.sleep(0.05)
        await channel.close()
        with pytest.raises(WeftError, match="the connection was lost") as cut:
            await call
    assert cut.value.reason is Reason.SERVICE_UNAVAILABLE


async def test_upload_and_watch_have_no_call_timeout() -> None:
    async def content() -> AsyncGenerator[bytes]:
        yield b"a"

    file = await FileClient(Slow(), timeout_seconds=0.01).save(file_service_pb2.File(tenant="ann"), content())
    assert file.byte_count == 3, "the file, its content and its length"
    news = [item async for item in TaskClient(Slow(), timeout_seconds=0.01).watch("ann", "task-1")]
    assert len(news) == 1


async def test_in_process_call_is_made_as_local_for_any_caller() -> None:
    ann = Principal(name="key:ann", tenant="ann", access=frozenset(), names_tenants=False)
    with as_caller(ann):
        news = [item async for item in TaskClient(Slow()).watch("ann", "task-1")]
        assert caller() is ann
    assert news[0].task.tenant == LOCAL.name
