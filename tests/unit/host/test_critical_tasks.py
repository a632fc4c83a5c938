"""A process whose critical task dies ends, and says why."""

import asyncio
import errno
from pathlib import Path

import pytest

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import start_critical, start_task, stop_tasks
from weft_app.compose.grpc_host import GrpcHost
from weft_app.compose.shutdown import CriticalTasks


async def _die(error: Exception) -> None:
    raise error


def test_failed_critical_task_stops_the_process_with_one_message() -> None:
    async def process() -> None:
        stop = asyncio.Event()
        with CriticalTasks(stop):
            task = start_critical(
                _die(OSError(errno.ENOSPC, "No space left on device", "/state/a.session")), name="runner-session"
            )
            async with asyncio.timeout(10.0):
                await stop.wait()
            # What the drain meets on its way does not hide the cause.
            await stop_tasks([task])

    with pytest.raises(WeftError) as ended:
        asyncio.run(process())
    assert ended.value.reason is Reason.INTERNAL
    assert ended.value.message.startswith(
        "the background task runner-session died (OSError /state/a.session: No space left on device), so this process"
    )


def test_error_that_may_quote_a_request_is_reported_without_its_message() -> None:
    async def process() -> None:
        stop = asyncio.Event()
        with CriticalTasks(stop):
            start_critical(_die(ValueError("my secret prompt")), name="task-engine")
            await stop.wait()

    with pytest.raises(WeftError, match=r"task-engine died \(ValueError\)") as ended:
        asyncio.run(process())
    assert "prompt" not in ended.value.message


def test_failed_work_cancelled_loop_or_callback_does_not_stop_the_process() -> None:
    async def process() -> None:
        stop, over = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        with CriticalTasks(stop):
            start_task(_die(ValueError("one request")), name="task-1")
            await stop_tasks([start_critical(asyncio.sleep(60), name="sweeper")])
            loop.call_soon(lambda: 1 // 0)
            loop.call_soon(loop.call_soon, over.set)
            await over.wait()
            assert not stop.is_set()

    asyncio.run(process())


class Dead:
    """A service that cannot stop, because what it runs has died."""

    service_names = ()

    def __init__(self, stopped: list[str], name: str, error: Exception | None) -> None:
        self._stopped, self._name, self._error = stopped, name, error

    def register(self, server: object) -> None:
        del server

    async def start(self) -> None:
        return

    async def stop(self, grace_seconds: float) -> None:
        del grace_seconds
        self._stopped.append(self._name)
        if self._error is not None:
            raise self._error


async def test_service_that_cannot_stop_does_not_block_the_others(tmp_path: Path) -> None:
    stopped: list[str] = []
    host = GrpcHost()
    host.bind(f"unix:{tmp_path / 's.sock'}")
    await host.start([Dead(stopped, "first", None), Dead(stopped, "second", ValueError("its loop died"))])
    with pytest.raises(ValueError, match="its loop died"):
        await host.stop(0.0)
    assert stopped == ["second", "first"]
    assert not (tmp_path / "s.sock").exists()
