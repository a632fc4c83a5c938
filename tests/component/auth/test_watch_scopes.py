"""What a key must be good for to follow a mesh: its snapshot tells of more than models."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc
import pytest
from kit.keys import KEY, as_key, ring
from registry_stage import registry_channel

from weft.api.registry.v1 import registry_service_pb2 as pb
from weft.api.registry.v1 import registry_service_pb2_grpc
from weft.kernel.channels.rpc import error_from_call
from weft.kernel.errors.reasons import Reason
from weft_app.cli.keys import KeyRole, scopes_of

if TYPE_CHECKING:
    from weft.api.registry.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub


@asynccontextmanager
async def registry(folder: Path, *scopes: str) -> AsyncIterator["RegistryServiceAsyncStub"]:
    """Its public reads."""
    async with registry_channel(folder, ring({KEY: scopes})) as channel:
        yield cast("RegistryServiceAsyncStub", registry_service_pb2_grpc.RegistryServiceStub(channel))


async def watched(stub: "RegistryServiceAsyncStub", *, with_keys: bool = False) -> pb.WatchResponse:
    call = stub.Watch(pb.WatchRequest(include_ticket_keys=with_keys), metadata=as_key(), timeout=5)
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
