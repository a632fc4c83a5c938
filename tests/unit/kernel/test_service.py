"""Background tasks end when told, and not in silence."""

import asyncio

import pytest
from structlog.testing import capture_logs

from weft.kernel.service import start_task, stop_tasks


async def _fail() -> None:
    raise ZeroDivisionError("a bug")


async def test_a_background_task_that_dies_is_logged_when_it_dies() -> None:
    with capture_logs() as logs:
        task = start_task(_fail(), name="watcher")
        await asyncio.sleep(0.01)
    assert [(line["event"], line["task"], line["log_level"]) for line in logs] == [
        ("background task died", "watcher", "critical")
    ]
    with pytest.raises(ZeroDivisionError):
        await stop_tasks([task])


async def test_a_background_task_that_is_stopped_is_no_news() -> None:
    with capture_logs() as logs:
        task = start_task(asyncio.sleep(60), name="watcher")
        await stop_tasks([task])
    assert task.cancelled()
    assert logs == []
