"""Calls of reloads that come while another reload is carried out."""

import asyncio

import pytest

from weft.api.operations.v1.configuration_service_pb2 import ReloadConfigurationResponse
from weft_app.compose.configuration_service import ConfigurationService


class SlowFile:
    """A configuration whose reloads last until the test lets them end."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = asyncio.Semaphore(0)

    async def reload(self, _: bool) -> ReloadConfigurationResponse:
        self.begun += 1
        read = f"{self.begun}.yaml"
        await self.may_end.acquire()
        return ReloadConfigurationResponse(files=[read])


async def _settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_concurrent_reload_waits_and_reads_the_file_again() -> None:
    """`weft mesh reload` was refused while `weft up --watch` carried out the same change."""
    file = SlowFile()
    service = ConfigurationService(file.reload)
    first = asyncio.create_task(service.reload(dry_run=False))
    second = asyncio.create_task(service.reload(dry_run=False))
    await _settled()
    assert file.begun == 1
    file.may_end.release()
    assert list((await first).files) == ["1.yaml"]
    await _settled()
    assert file.begun == 2
    file.may_end.release()
    assert list((await second).files) == ["2.yaml"]


async def test_stopping_service_starts_no_pending_reload() -> None:
    file = SlowFile()
    service = ConfigurationService(file.reload)
    calls = [asyncio.create_task(service.reload(dry_run=False)) for _ in range(2)]
    await _settled()
    await service.stop(0.0)
    for call in calls:
        with pytest.raises(asyncio.CancelledError):
            await call
    assert file.begun == 1
