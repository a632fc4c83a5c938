"""RequestService over a socket, and what a router's refusal still says when it has crossed one."""

from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from kit.request_endings import ending
from request_reads import NothingRuns, remote

from router_svc.client_registry import ClientRegistry, ClientsConfig
from router_svc.placement import PlacementServicer
from router_svc.policy.decisions import Waits
from router_svc.policy.request import Request
from router_svc.policy.settings import RateLimitConfig
from router_svc.request_log import RequestLog, RequestLogLimits
from router_svc.request_servicer import RequestServicer
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import placement_service_pb2_grpc
from weft.api.router.v1 import request_service_pb2 as pb
from weft.dispatch.placement import Decision, OnCancelled, Placement
from weft.dispatch.remote_router import RemoteRouter
from weft.durable.requests import RequestClient
from weft.kernel.clock import SystemClock
from weft.kernel.errors import FieldError, WeftError
from weft.kernel.placement_request import PlacementRequest
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft.kernel.rpc import new_server, open_channel
from weft_testing.fake_clock import FakeClock


class Router:
    """A log and clients, and both ways to them."""

    def __init__(self) -> None:
        self.log = RequestLog()
        self.clock = FakeClock()
        self.clients = ClientRegistry(ClientsConfig(), RateLimitConfig(), self.clock)
        loop: Any = NothingRuns()
        self.servicer = RequestServicer(self.log, self.clients, self.clock, loop)
        self.local = RequestClient(self.servicer)

    def arrive(self, key: int, request_id: str, tenant: str = "a") -> None:
        request = PlacementRequest(
            request_id=request_id, tenant=tenant, model="qwen", operation=Operation.CHAT, client_id="app"
        )
        self.log.note_arrival(Request.of(key, request, 1_000.0), datetime(2026, 11, 20, tzinfo=UTC))
        self.clients.admit(key, request)
        self.log.note_decisions([Waits(key=key, position=key, reason="all slots are busy", eta_seconds=2.5)], 1_000.0)


async def test_remote_reads_equal_local_reads(tmp_path: Path) -> None:
    router = Router()
    for key, tenant in ((1, "a"), (2, "b"), (3, "a")):
        router.arrive(key, f"r-{key}", tenant)
    async with remote(router.servicer, tmp_path) as requests:
        assert await requests.request("r-2") == await router.local.request("r-2")
        assert (await requests.request("r-2")).queued.eta.ToMilliseconds() == 2500
        assert await requests.clients() == await router.local.clients()
        for tenant, limit, ids, total in (("", 2, ["r-1", "r-2"], 3), ("a", 5, ["r-1", "r-3"], 2), ("c", 5, [], 0)):
            for source in (requests, router.local):
                found = await source.requests(limit, tenant)
                assert ([one.request_id for one in found.requests], found.total_count) == (ids, total)
                assert all(not one.decisions for one in found.requests)


async def test_ended_requests_are_listed_by_outcome_newest_first(tmp_path: Path) -> None:
    router = Router()
    ends = {1: Reason.UNSPECIFIED, 2: Reason.STALL_TIMEOUT, 3: Reason.CANCELLED, 4: None, 5: Reason.UNSPECIFIED}
    for key, reason in ends.items():
        router.arrive(key, f"r-{key}", "b" if key == 5 else "a")
        router.log.note_end(ending(key, router.clock.monotonic(), Reason.CANCELLED if reason is None else reason))
    router.arrive(6, "r-6", "a")
    wanted = [
        (pb.REQUEST_SELECTION_ENDED, "", ["r-5", "r-4", "r-3", "r-2", "r-1"]),
        (pb.REQUEST_SELECTION_COMPLETED, "", ["r-5", "r-1"]),
        (pb.REQUEST_SELECTION_COMPLETED, "a", ["r-1"]),
        (pb.REQUEST_SELECTION_FAILED, "", ["r-2"]),
        (pb.REQUEST_SELECTION_CANCELLED, "", ["r-4", "r-3"]),
        (pb.REQUEST_SELECTION_UNSPECIFIED, "", ["r-6"]),
    ]
    async with remote(router.servicer, tmp_path) as requests:
        for selection, tenant, ids in wanted:
            for source in (requests, router.local):
                found = await source.requests(100, tenant, selection)
                assert ([one.request_id for one in found.requests], found.total_count) == (ids, len(ids))
        few = await requests.requests(2, "", pb.REQUEST_SELECTION_ENDED)
        assert ([one.request_id for one in few.requests], few.total_count) == (["r-5", "r-4"], 5)
        await router.clock.advance(RequestLogLimits().keep_seconds + 1)
        assert (await requests.requests(100, "", pb.REQUEST_SELECTION_ENDED)).total_count == 0, "they are forgotten"
        with pytest.raises(FieldError) as caught:
            await requests.requests(100, "", 99)  # type: ignore[arg-type]  # of a later release
        assert caught.value.field == "selection"


@pytest.mark.parametrize(("request_id", "tenant"), [("r-9", ""), ("r-1", "b")])
async def test_unknown_and_foreign_requests_return_the_same_not_found_message(
    tmp_path: Path, request_id: str, tenant: str
) -> None:
    router = Router()
    router.arrive(1, "r-1", "a")
    async with remote(router.servicer, tmp_path) as requests:
        for source in (requests, router.local):
            with pytest.raises(WeftError, match=f"no request {request_id} is known") as caught:
                await source.request(request_id, tenant)
            assert caught.value.reason is Reason.NOT_FOUND


async def test_invalid_id_or_limit_is_rejected_by_name(tmp_path: Path) -> None:
    async with remote(Router().servicer, tmp_path) as requests:
        with pytest.raises(FieldError) as caught:
            await requests.request("two words")
        assert caught.value.field == "request_id"
        with pytest.raises(FieldError) as caught:
            await requests.request("r-1", "no tenant")
        assert caught.value.field == "tenant"
        with pytest.raises(FieldError) as caught:
            await requests.requests(-1)
        assert caught.value.field == "limit"


class _RefusingPlace(Placement):
    def __init__(self, refusal: WeftError) -> None:
        self._refusal = refusal

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    async def next_decision(self) -> Decision:
        raise self._refusal

    def watch_cancellation(self, on_cancelled: OnCancelled) -> None: ...

    async def report_first_content(self, attempt: int) -> None:
        del attempt

    async def report_attempt_failed(self, attempt: int, reason: Reason, message: str = "") -> None:
        del attempt, reason

    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        del reason, receipt
        return True


class _RefusingRouter:
    """Records the requests, and refuses them."""

    def __init__(self, refusal: WeftError) -> None:
        self._refusal = refusal
        self.asked: list[PlacementRequest] = []

    def place(self, request: PlacementRequest) -> _RefusingPlace:
        self.asked.append(request)
        return _RefusingPlace(self._refusal)

    async def quote(self, request: PlacementRequest) -> Any:
        raise AssertionError(f"{request.request_id} asks for no quote")

    async def queues(self) -> list[Any]:
        return []

    async def report_end(self, request: PlacementRequest, receipt: receipt_pb2.Receipt) -> bool:
        raise AssertionError(f"{request.request_id} has not ended: {receipt}")


REFUSALS = [
    WeftError(
        Reason.QUEUE_FULL,
        "Queue depth 16/16",
        metadata={"queueDepth": "16", "maxDepth": "16", "avgWaitMs": "2000"},
        retry_after_seconds=5.0,
    ),
    WeftError(
        Reason.RATE_LIMIT_EXCEEDED,
        "Tenant a exceeded 100 req/min",
        metadata={"tenant": "a", "limit": "100", "remaining": "0", "resetAt": "1745880060"},
        retry_after_seconds=29.5,
    ),
    WeftError(
        Reason.DEADLINE_UNREACHABLE,
        "it would take 52 s",
        metadata={"estimate_seconds": "52.1"},
        retry_after_seconds=1.0,
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.reason.name)
async def test_rejection_metadata_survives_the_placement_call(tmp_path: Path, refusal: WeftError) -> None:
    router = _RefusingRouter(refusal)
    server = new_server()
    placement_service_pb2_grpc.add_PlacementServiceServicer_to_server(PlacementServicer(router), server)
    address = f"unix:{tmp_path / 'router.sock'}"
    server.add_insecure_port(address)
    await server.start()
    channel = open_channel(address)
    request = PlacementRequest(
        request_id="r", tenant="a", model="qwen", operation=Operation.CHAT, client_id="app", names_priority=False
    )
    try:
        async with RemoteRouter(channel, SystemClock()).place(request) as place:
            with pytest.raises(WeftError) as caught:
                await place.next_decision()
    finally:
        await channel.close(grace=None)
        await server.stop(grace=None)
    found = caught.value
    assert (found.reason, found.message, found.metadata) == (refusal.reason, refusal.message, refusal.metadata)
    assert found.retry_after_seconds == refusal.retry_after_seconds
    assert router.asked == [request], "also that it names no band"
