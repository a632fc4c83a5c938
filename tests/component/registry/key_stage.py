"""A running registry that has API keys."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from google.protobuf.duration_pb2 import Duration
from registry_harness import RunningRegistry, running_registry

from registry_svc.keys.api_keys import ApiKeys, SqlKeyStore
from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.store import SqlStore
from registry_svc.registry_config import KeysConfig, RegistryConfig
from weft.api.registry.v1 import key_service_pb2 as pb
from weft.api.registry.v1 import key_service_pb2_grpc
from weft.kernel.access.principal import KeyRing, authenticate
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.compose.key_ring import KeyRingWatcher
from weft_testing.fake_clock import FakeClock

if TYPE_CHECKING:
    from weft.api.registry.v1.key_service_pb2_grpc import KeyServiceAsyncStub

PEPPER_NAME = "key-pepper"


@dataclass
class KeyStage:
    """The registry, and its keys as a caller sees them."""

    mesh: RunningRegistry
    keys: "KeyServiceAsyncStub"

    async def create(self, *, seconds: int = 0, **wish: Any) -> tuple[str, str]:
        """Id and whole text of a new key."""
        lifetime = Duration(seconds=seconds) if seconds else None
        response = await self.keys.CreateKey(pb.CreateKeyRequest(lifetime=lifetime, **wish))
        return response.key.id, response.text

    async def listed(self) -> list[pb.Key]:
        return list((await self.keys.ListKeys(pb.ListKeysRequest())).keys)

    async def revoke(self, key_id: str) -> None:
        await self.keys.RevokeKey(pb.RevokeKeyRequest(id=key_id))

    async def rotate(self, key_id: str, grace: float | None = None) -> pb.RotateKeyResponse:
        wish = None if grace is None else Duration(seconds=int(grace))
        return await self.keys.RotateKey(pb.RotateKeyRequest(id=key_id, grace=wish))

    def watcher(self) -> KeyRingWatcher:
        """Not yet started; it never pauses by the registry's clock."""
        return KeyRingWatcher(self.mesh.channel, FakeClock())

    async def ring(self) -> KeyRing:
        """What a service that comes up now knows."""
        watcher = self.watcher()
        await watcher.start()
        await watcher.wait_ready()
        await watcher.stop()
        return watcher.ring

    async def is_good(self, text: str) -> bool:
        return knows(await self.ring(), text, self.mesh.clock)


def knows(ring: KeyRing, text: str, clock: FakeClock) -> bool:
    try:
        authenticate(ring, text, clock.utc_now())
    except WeftError as refused:
        if refused.reason is not Reason.UNAUTHENTICATED:
            raise
        return False
    return True


@asynccontextmanager
async def registry_with_keys(
    folder: Path, *, clock: FakeClock | None = None, config: KeysConfig | None = None
) -> AsyncIterator[KeyStage]:
    """Serving in `folder`; the pepper is there too."""
    keys = config or KeysConfig(pepper_file=folder / PEPPER_NAME)
    async with running_registry(folder, clock=clock, keys=cast("float", keys)) as mesh:
        yield KeyStage(mesh, cast("KeyServiceAsyncStub", key_service_pb2_grpc.KeyServiceStub(mesh.channel)))


@asynccontextmanager
async def bare_keys(folder: Path, *, watch_buffer_responses: int = 1024) -> AsyncIterator[tuple[ApiKeys, SqlStore]]:
    """Keys without a server, and the database they are on."""
    database, clock = SqlStore("sqlite://"), FakeClock()
    config = RegistryConfig(
        database_url="sqlite://",
        watch_buffer_responses=watch_buffer_responses,
        keys=KeysConfig(pepper_file=folder / PEPPER_NAME),
    )
    core = RegistryCore(database, clock, config)
    keys = ApiKeys(core, SqlKeyStore(database))
    await core.start()
    await keys.start()
    try:
        yield keys, database
    finally:
        keys.close()
        await core.stop(grace_seconds=1.0)
