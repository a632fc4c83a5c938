"""A registry that asks for keys."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from kit.grpc_server import served

from registry_svc.registry_config import RegistryConfig
from registry_svc.registry_service import build
from weft.kernel.access.principal import KeyRing
from weft_testing.fake_clock import FakeClock


@asynccontextmanager
async def registry_channel(folder: Path, keys: KeyRing) -> AsyncIterator[grpc.aio.Channel]:
    service = build(RegistryConfig(database_url=f"sqlite:///{folder}/registry.db"), clock=FakeClock())
    await service.start()
    try:
        async with served(service.register, keys=keys) as channel:
            yield channel
    finally:
        await service.stop(grace_seconds=5.0)
