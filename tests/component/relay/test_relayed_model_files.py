"""What a joined machine may ask of the mesh's model files; tests/e2e/test_joined_copies.py copies some."""

from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
from kit.failures import fails
from kit.resources import page, records

from router_svc.relay_models import ModelCalls
from router_svc.relay_sessions import LinkSession
from weft.api.registry.v1.registry_service_pb2 import ListResourcesRequest
from weft.api.registry.v1.runner_pb2 import Runner
from weft.api.runner.v1.runner_service_pb2 import FindStoredModelRequest, ReadModelFileRequest
from weft.kernel.channels.rpc import ChannelPool
from weft.kernel.errors.reasons import Reason

CALL: Any = None
"""A call that must not be looked at."""


async def test_only_a_runner_with_a_session_may_ask_and_only_for_runners() -> None:
    pool = ChannelPool()
    async with grpc.aio.insecure_channel("127.0.0.1:9") as nowhere:
        calls = ModelCalls(nowhere, pool)
        stranger, joined = LinkSession(), LinkSession(runner="laptop", session_id="ses-1")
        for ask in (
            calls.list_runners(CALL, stranger, ListResourcesRequest(kind="runner")),
            calls.find(CALL, stranger, FindStoredModelRequest()),
            calls.read(CALL, stranger, ReadModelFileRequest()),
        ):
            with fails(Reason.PERMISSION_DENIED, "no session is open over this link"):
                await ask
        for kind in ("model", "agent", "tenant", ""):
            with fails(Reason.PERMISSION_DENIED, "runners only"):
                await calls.list_runners(CALL, joined, ListResourcesRequest(kind=kind))
    await pool.close()


async def test_joined_machine_learns_which_runners_are_of_the_mesh_itself() -> None:
    """Without the word of the hub it copies from those only."""
    calls = ModelCalls(Mock(), ChannelPool())
    known = [Runner(name="desk", address="desk:1", host="desk"), Runner(name="other", address="r:1", dial_out=True)]
    calls._registry = AsyncMock(ListResources=AsyncMock(return_value=page(known)))
    joined = LinkSession(runner="laptop", session_id="ses-1")
    listed: Any = await calls.list_runners(CALL, joined, ListResourcesRequest(kind="runner"))
    assert records(listed.resources) == [Runner(name="desk"), Runner(name="other", dial_out=True)]
