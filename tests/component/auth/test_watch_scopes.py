"""What a key must be good for to follow a mesh: its snapshot tells of more than models."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc
import pytest

from registry_svc.config import RegistryConfig
from registry_svc.service import build
from weft.api.registry.v1 import registry_service_pb2 as pb
from weft.api.registry.v1 import registry_service_pb2_grpc
from weft.kernel.principal import KeyRing, KeyVerifier, key_digest, key_text, parse_scopes
from weft.kernel.reasons import Reason
from weft.kernel.rpc import error_from_call, new_server, open_channel
from weft.kernel.rpc_auth import AuthInterceptor
from weft_app.cli.keys import KeyRole, scopes_of
from weft_testing.fake_clock import FakeClock

if TYPE_CHECKING:
    from weft.api.registry.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub

PEPPER, SECRET, KEY_ID = b"p" * 32, "5" * 64, "abcdefghijk1"


def ring(*scopes: str) -> KeyRing:
    verifier = KeyVerifier(
        key_id=KEY_ID, tenant="ann", access=parse_scopes(scopes, "scopes"), digest=key_digest(PEPPER, SECRET)
    )
    return KeyRing(pepper=PEPPER, keys={KEY_ID: verifier})


@asynccontextmanager
async def registry_channel(folder: Path, *scopes: str) -> AsyncIterator[grpc.aio.Channel]:
    """To a registry that asks for keys; the one key has these scopes."""
    clock, keys = FakeClock(), ring(*scopes)
    service = build(RegistryConfig(database_url=f"sqlite:///{folder}/registry.db"), clock=clock)
    server = new_server((AuthInterceptor(lambda: keys, clock),))
    service.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await service.start()
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await service.stop(grace_seconds=5.0)
        await server.stop(grace=None)


@asynccontextmanager
async def registry(folder: Path, *scopes: str) -> AsyncIterator["RegistryServiceAsyncStub"]:
    """Its public reads."""
    async with registry_channel(folder, *scopes) as channel:
        yield cast("RegistryServiceAsyncStub", registry_service_pb2_grpc.RegistryServiceStub(channel))


async def watched(stub: "RegistryServiceAsyncStub", *, with_keys: bool = False) -> pb.WatchResponse:
    metadata = (("x-api-key", key_text(KEY_ID, SECRET)),)
    call = stub.Watch(pb.WatchRequest(include_ticket_keys=with_keys), metadata=metadata, timeout=5)
    first = await call.read()
    call.cancel()
    assert isinstance(first, pb.WatchResponse), await call.code()
    return first


@pytest.mark.parametrize(
    ("scopes", "missing"),
    [
        (("models:view",), "runners:view"),
        (("models:view", "runners:view"), "settings:view"),
        (("runners:view", "settings:view"), "models:view"),
    ],
)
async def test_watch_hides_runners_and_settings_outside_the_callers_scopes(
    tmp_path: Path, scopes: tuple[str, ...], missing: str
) -> None:
    async with registry(tmp_path, *scopes) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await watched(stub)
        error = error_from_call(found.value, Reason.INTERNAL)
        assert (error.reason, error.message) == (Reason.PERMISSION_DENIED, f"the key lacks the scope {missing}")


async def test_viewer_can_watch_and_only_a_service_receives_ticket_keys(tmp_path: Path) -> None:
    async with registry(tmp_path, *scopes_of(KeyRole.VIEWER)) as stub:
        assert (await watched(stub)).HasField("snapshot")
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await watched(stub, with_keys=True)
        assert found.value.code() is grpc.StatusCode.PERMISSION_DENIED
    async with registry(tmp_path, *scopes_of(KeyRole.SERVICE)) as stub:
        assert (await watched(stub, with_keys=True)).HasField("snapshot")
