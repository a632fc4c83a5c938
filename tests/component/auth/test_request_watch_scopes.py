"""Whose requests a key may watch over gRPC, and who may read figures, which are of all tenants."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, cast

import grpc
import pytest
from kit.grpc_server import served
from kit.keys import as_key, ring
from kit.request_endings import ending

from router_svc.client_registry import ClientRegistry, ClientsConfig
from router_svc.policy.pool_settings import RateLimitConfig
from router_svc.policy.router_request import Request
from router_svc.request_log import RequestLog
from router_svc.request_servicer import RequestServicer
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import request_service_pb2 as pb
from weft.api.router.v1 import request_service_pb2_grpc
from weft.kernel.channels.rpc import error_from_call
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation
from weft.kernel.time.clock import SystemClock

if TYPE_CHECKING:
    from weft.api.router.v1.request_service_pb2_grpc import RequestServiceAsyncStub

KEYS = ring(
    {
        "ann000000000": ["inference:view"],
        "bob000000000": ["inference:view"],
        "ops000000000": ["telemetry:view"],
        "sam000000000": ["inference:view", "runners:view"],
    },
    tenants={"bob000000000": "bob", "ops000000000": "ops"},
)


class NothingRuns:
    """A scheduling loop without requests."""

    def cancel(self, request_id: str, tenant: str, cancelled_by: str) -> dict[int, object]:
        raise AssertionError(request_id, tenant, cancelled_by)

    def finish(self, key: int, reason: Reason) -> None:
        raise AssertionError(key, reason)


def arrive(log: RequestLog, key: int, tenant: str) -> None:
    request = PlacementRequest(request_id=f"{tenant}-{key}", tenant=tenant, model="qwen", operation=Operation.CHAT)
    log.note_arrival(Request.of(key, request, SystemClock().monotonic()), datetime(2026, 11, 20, tzinfo=UTC))


@asynccontextmanager
async def serving(log: RequestLog) -> AsyncIterator["RequestServiceAsyncStub"]:
    """A RequestService that asks for keys."""
    clock = SystemClock()
    clients = ClientRegistry(ClientsConfig(), RateLimitConfig(), clock)
    local = RequestServicer(log, clients, clock, NothingRuns())  # type: ignore[arg-type]  # nothing is cancelled
    async with served(
        partial(request_service_pb2_grpc.add_RequestServiceServicer_to_server, local), keys=KEYS
    ) as channel:
        with closing(local):
            yield cast("RequestServiceAsyncStub", request_service_pb2_grpc.RequestServiceStub(channel))


async def test_key_watches_only_requests_of_its_own_tenant() -> None:
    log = RequestLog()
    for key, tenant in ((1, "ann"), (2, "bob")):
        arrive(log, key, tenant)
    async with serving(log) as stub:
        call = stub.WatchRequests(pb.WatchRequestsRequest(ended_limit=10), metadata=as_key("ann000000000"), timeout=10)
        first = await call.read()
        assert isinstance(first, pb.WatchRequestsResponse)
        assert [one.request_id for one in first.requests] == ["ann-1"]
        arrive(log, 3, "bob")
        arrive(log, 4, "ann")
        second = await call.read()
        assert isinstance(second, pb.WatchRequestsResponse)
        assert [one.request_id for one in second.requests] == ["ann-4"]
        call.cancel()


@pytest.mark.parametrize(
    ("method", "request_message", "key_id"),
    [
        ("WatchRequests", pb.WatchRequestsRequest(tenant="bob"), "ann000000000"),
        ("WatchRequests", pb.WatchRequestsRequest(), "ops000000000"),
        ("WatchFigures", pb.WatchFiguresRequest(), "ann000000000"),
    ],
)
async def test_requests_of_another_tenant_or_outside_the_scopes_are_rejected(
    method: str, request_message: object, key_id: str
) -> None:
    async with serving(RequestLog()) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(stub, method)(request_message, metadata=as_key(key_id), timeout=10).read()
    assert error_from_call(caught.value, Reason.INTERNAL).reason is Reason.PERMISSION_DENIED


@pytest.mark.parametrize(("key_id", "lines"), [("ann000000000", []), ("sam000000000", ["loaded"])])
async def test_engine_log_lines_need_the_runner_view_scope(key_id: str, lines: list[str]) -> None:
    log = RequestLog()
    arrive(log, 1, "ann")
    receipt = receipt_pb2.Receipt()
    receipt.attempts.add(message="it died", engine_log=["loaded"])
    log.note_end(ending(1, SystemClock().monotonic(), Reason.SERVER_DIED, receipt))
    async with serving(log) as stub:
        found = await stub.GetRequest(pb.GetRequestRequest(request_id="ann-1"), metadata=as_key(key_id), timeout=10)
    (attempt,) = found.request.receipt.attempts
    assert (attempt.message, list(attempt.engine_log)) == ("it died", lines)


async def test_metrics_need_the_telemetry_view_scope() -> None:
    async with serving(RequestLog()) as stub:
        found = await stub.GetFigures(pb.GetFiguresRequest(), metadata=as_key("ops000000000"), timeout=10)
        assert found.HasField("figures")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetFigures(pb.GetFiguresRequest(), metadata=as_key("bob000000000"), timeout=10)
    assert error_from_call(caught.value, Reason.INTERNAL).reason is Reason.PERMISSION_DENIED
