"""GET /v1/requests, one request, and GET /v1/clients."""

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest
from gateway_script import serving
from kit.keys import KEY, Keys

from weft.api.common.v1 import priority_pb2, receipt_pb2
from weft.api.router.v1 import request_pb2 as pb
from weft.api.router.v1.figures_pb2 import Figures
from weft.api.router.v1.request_service_pb2 import (
    LimitUse,
    ListClientsResponse,
    ListLimitUsesResponse,
    ListRequestsResponse,
    WatchRequestsResponse,
)
from weft.durable.requests import UNDER_WAY, RequestClient, Selection, not_remembered
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


def waiting(request_id: str = "req-1", tenant: str = "default") -> pb.RequestRecord:
    record = pb.RequestRecord(
        request_id=request_id,
        tenant=tenant,
        target="qwen",
        priority=priority_pb2.PRIORITY_HIGH,
        state=pb.RequestRecord.STATE_QUEUED,
    )
    record.arrive_time.FromJsonString("2026-11-20T12:00:00Z")
    record.queued.position, record.queued.reason = 3, "VRAM: needs 5.1 GiB on host-a, held by qwen until idle"
    record.queued.eta.FromMilliseconds(8_500)
    decision = record.decisions.add(kind=pb.DecisionRecord.KIND_QUEUED, detail="it waits", candidate_count=1)
    decision.candidates.add(model="qwen-1", runner="titan", score=0.5, gate="all 4 slots are busy")
    return record


def ended() -> pb.RequestRecord:
    record = pb.RequestRecord(
        request_id="req-2",
        tenant="default",
        target="route/drafts",
        state=pb.RequestRecord.STATE_ENDED,
        reason=Reason.WORKER_LOST.value,  # type: ignore[arg-type]  # same numbers
        message="the runner is gone",
    )
    record.receipt.outcome = receipt_pb2.OUTCOME_FAILED
    record.receipt.attempts.add(runner="titan", model="qwen-1", reason=Reason.WORKER_LOST.value)
    record.receipt.queue_wait.FromMilliseconds(150)
    record.receipt.usage.prompt_tokens = 7
    return record


def figures_of(steps: int, start: str) -> Figures:
    figures = Figures(step_count=steps, waiting=[1] * steps, running=[0] * steps)
    figures.step.FromSeconds(10)
    figures.start_time.FromJsonString(start)
    figures.all.completed[:] = [2] * steps
    figures.all.time_to_first_token.p50[:] = [0.5] * (steps - 1) + [math.nan]
    return figures


@dataclass
class ScriptedRequests(RequestClient):
    """Has `records`, and records its calls."""

    records: list[pb.RequestRecord] = field(default_factory=lambda: [waiting(), ended(), waiting("req-3", "b")])
    failure: WeftError | None = None
    asked: list[tuple[object, ...]] = field(default_factory=list)
    changed: "asyncio.Queue[pb.RequestRecord | Figures]" = field(default_factory=asyncio.Queue)
    """What watches are sent after the snapshot."""

    async def request(self, request_id: str, tenant: str = "") -> pb.RequestRecord:
        self._note(request_id, tenant)
        for record in self.records:
            if record.request_id == request_id and tenant in ("", record.tenant):
                return record
        raise not_remembered(request_id)

    async def requests(
        self, limit: int = 100, tenant: str = "", selection: Selection = UNDER_WAY
    ) -> ListRequestsResponse:
        self._note(limit, tenant, *((selection,) if selection else ()))
        found = [record for record in self.records if record.tenant == tenant]
        return ListRequestsResponse(requests=found[:limit], total_count=len(found))

    async def cancel(self, request_id: str, tenant: str, cancelled_by: str) -> pb.RequestRecord:
        found = pb.RequestRecord()
        found.CopyFrom(await self.request(request_id, tenant))
        if found.state != pb.RequestRecord.STATE_ENDED:
            found.state, found.reason = pb.RequestRecord.STATE_ENDED, Reason.CANCELLED.value  # type: ignore[assignment]
            found.cancelled_by = cancelled_by
        return found

    async def watch(self, tenant: str = "", ended_limit: int = 0) -> AsyncGenerator[WatchRequestsResponse]:
        self._note(tenant, ended_limit)
        found = [record for record in self.records if record.tenant == tenant]
        yield WatchRequestsResponse(requests=found, synced=True)
        while True:
            record = await self.changed.get()
            assert isinstance(record, pb.RequestRecord)
            if record.tenant == tenant:
                yield WatchRequestsResponse(requests=[record])

    async def figures(self, *, day: bool = False) -> Figures:
        self._note(day)
        return figures_of(3, start="2026-11-20T12:00:00Z")

    async def watch_figures(self) -> AsyncGenerator[Figures]:
        yield await self.figures()
        while True:
            figures = await self.changed.get()
            assert isinstance(figures, Figures)
            yield figures

    async def limit_uses(self, tenant: str = "") -> ListLimitUsesResponse:
        return ListLimitUsesResponse(uses=[LimitUse(tenant=tenant or "a", limit=10, used=1)])

    async def clients(self) -> ListClientsResponse:
        self._note()
        client = pb.ClientRecord(client_id="batch", has_profile=True, request_count=5, route="drafts")
        client.targets.add(target="qwen", request_count=5)
        client.usual_interval.FromMilliseconds(2_000)
        return ListClientsResponse(clients=[client])

    def _note(self, *asked: object) -> None:
        self.asked.append(asked)
        if self.failure is not None:
            raise self.failure


async def test_waiting_request_shows_its_reason_and_duration() -> None:
    async with serving(requests=ScriptedRequests()) as gateway:
        found = await gateway.read("/v1/requests/req-1")
    assert (found["kind"], found["requestId"], found["state"], found["priority"]) == (
        "request", "req-1", "queued", "high",
    )  # fmt: skip
    assert found["queued"] == {
        "position": 3,
        "reason": "VRAM: needs 5.1 GiB on host-a, held by qwen until idle",
        "etaSeconds": 8.5,
    }
    (decision,) = found["decisions"]
    assert (decision["kind"], decision["candidateCount"]) == ("queued", 1)
    assert decision["candidates"] == [
        {"model": "qwen-1", "runner": "titan", "score": 0.5, "gate": "all 4 slots are busy", "chosen": False}
    ]
    assert found["arrivedAt"] == "2026-11-20T12:00:00Z"


@pytest.mark.parametrize(
    ("scopes", "shown"), [(("inference:view",), []), (("inference:view", "runners:view"), ["busy"])]
)
async def test_engine_log_lines_need_the_runner_scope(scopes: tuple[str, ...], shown: list[str]) -> None:
    record = ended()
    record.receipt.attempts[0].engine_log.append("busy")
    async with serving(requests=ScriptedRequests([record]), keys=Keys(scopes, "default")) as gateway:
        found = (await gateway.request("GET", "/v1/requests/req-2", key=KEY)).of(200)
    assert found["receipt"]["attempts"][0].get("engineLog", []) == shown


@pytest.mark.parametrize("path", ["team/a@1", "team%2Fa@1"])
async def test_request_id_with_a_slash_is_found(path: str) -> None:
    async with serving(requests=ScriptedRequests([waiting("team/a@1")])) as gateway:
        found = await gateway.read(f"/v1/requests/{path}")
    assert found["requestId"] == "team/a@1"


async def test_request_of_another_tenant_returns_404() -> None:
    async with serving(requests=ScriptedRequests()) as gateway:
        for path, headers in (("req-3", {"X-Tenant-ID": "a"}), ("req-1", {"X-Tenant-ID": "b"}), ("req-9", {})):
            response = await gateway.request("GET", f"/v1/requests/{path}", headers=headers)
            error = response.of(404)["error"]
            assert (error["code"], "is known" in error["message"]) == ("not_found", True)
        assert await gateway.read("/v1/requests/req-3", {"X-Tenant-ID": "b"})


async def test_list_contains_only_requests_of_the_tenant() -> None:
    script = ScriptedRequests()
    async with serving(requests=script) as gateway:
        mine = await gateway.read("/v1/requests?limit=1")
        theirs = await gateway.read("/v1/requests", {"X-Tenant-ID": "b"})
    assert ([one["requestId"] for one in mine["items"]], mine["total"]) == (["req-1"], 2)
    assert ([one["requestId"] for one in theirs["items"]], theirs["total"]) == (["req-3"], 1)
    assert script.asked == [(1, "default"), (100, "b")]


async def test_clients_are_listed_only_for_local_callers() -> None:
    config = {"Host": "gateway.example"}
    async with serving(requests=ScriptedRequests()) as gateway:
        found = await gateway.read("/v1/clients")
        refused = await gateway.request("GET", "/v1/clients", headers=config)
    (client,) = found["items"]
    assert (client["clientId"], client["requestCount"], client["route"]) == ("batch", 5, "drafts")
    assert (client["usualIntervalSeconds"], client["defaultPriority"]) == (2.0, "normal")
    assert client["targets"] == [{"target": "qwen", "requestCount": 5}]
    assert refused.status == 403


@pytest.mark.parametrize("path", ["/v1/requests", "/v1/requests/req-1", "/v1/clients"])
async def test_unavailable_router_returns_503(path: str) -> None:
    script = ScriptedRequests(failure=WeftError(Reason.SERVICE_UNAVAILABLE, "the connection was lost"))
    async with serving(requests=script) as gateway:
        response = await gateway.request("GET", path)
    assert response.of(503)["error"]["code"] == "service_unavailable"


async def test_metrics_use_null_for_unknown_values() -> None:
    async with serving(requests=ScriptedRequests()) as gateway:
        found = await gateway.read("/v1/admin/figures")
    assert (found["kind"], found["stepSeconds"], found["start"]) == ("figures", 10, "2026-11-20T12:00:00Z")
    assert (found["stepCount"], found["waiting"], found["all"]["completed"]) == (3, [1, 1, 1], [2, 2, 2])
    assert found["all"]["timeToFirstTokenSeconds"]["p50"] == [0.5, 0.5, None]
