"""The request log of the scheduling loop: the record of a request can be read while it runs and afterwards."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from kit.fleet import model_view, ready, runner_view
from kit.scheduling import placement_request as asked
from kit.scheduling import scheduling_loop
from kit.serving import served
from prometheus_client import generate_latest

from router_svc.client_registry import ClientsConfig
from router_svc.loop import RouterRecords, SchedulingLoop
from router_svc.placement import LocalPlacement, PlacementServicer, add_placement_to_server
from router_svc.policy.pool_settings import ClientProfile, RateLimitConfig
from router_svc.request_servicer import RequestServicer
from router_svc.router_metrics import RouterMetrics
from weft.api.common.v1 import receipt_pb2
from weft.api.registry.v1.route_pb2 import Route, RouteManifest
from weft.api.router.v1 import request_pb2 as pb
from weft.api.router.v1 import request_service_pb2_grpc
from weft.dispatch.fleet import FleetView
from weft.dispatch.placement import PlacementPort
from weft.dispatch.remote_router import RemoteRouter
from weft.durable.requests import RequestClient
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft.kernel.time.clock import SystemClock
from weft.kernel.values.units import Rate


class Router:
    def __init__(self, loop: SchedulingLoop, books: RouterRecords, metrics: RouterMetrics) -> None:
        self.loop = loop
        self.metrics = metrics
        self.books = books
        self.placement = LocalPlacement(loop)
        self.servicer = RequestServicer(books.requests, books.clients, SystemClock(), loop)
        self.requests = RequestClient(self.servicer)

    async def told(self, request_id: str) -> pb.RequestRecord:
        return await self.requests.request(request_id)


def mesh_view(slots: int = 1) -> FleetView:
    return FleetView(1, {"titan": runner_view(instances={"qwen": ready(slots=slots)})}, {"qwen": model_view()})


@asynccontextmanager
async def router(rates: RateLimitConfig | None = None, view: FleetView | None = None) -> AsyncIterator[Router]:
    clock = SystemClock()
    profiles = {"nightly": ClientProfile(priority=Priority.LOW)}
    books = RouterRecords.empty(clock, clients=ClientsConfig(profiles=profiles), rate_limits=rates)
    metrics = RouterMetrics()
    loop = scheduling_loop(view or mesh_view(), clock=clock, records=books, observer=metrics)
    try:
        yield Router(loop, books, metrics)
    finally:
        loop.close()


@asynccontextmanager
async def both_ways(
    mesh: Router, folder: Path, *, is_remote: bool
) -> AsyncIterator[tuple[PlacementPort, RequestClient]]:
    if not is_remote:
        yield mesh.placement, mesh.requests
        return
    placement = add_placement_to_server
    requests = request_service_pb2_grpc.add_RequestServiceServicer_to_server
    services = (placement, PlacementServicer(mesh.placement)), (requests, mesh.servicer)
    async with served(folder / "router.sock", *services) as channel:
        yield RemoteRouter(channel, SystemClock()), RequestClient(channel)


def kinds(record: pb.RequestRecord) -> list[int]:
    return [decision.kind for decision in record.decisions]


async def test_request_is_tracked_from_queue_to_receipt() -> None:
    async with router() as mesh:
        first = mesh.placement.place(asked("r-1"))
        second = mesh.placement.place(asked("r-2", client_id="nightly", names_priority=False))
        async with first, second:
            assert (await first.next_decision()).HasField("granted")
            assert (await second.next_decision()).HasField("queued")
            running, waiting = await mesh.told("r-1"), await mesh.told("r-2")
            assert running.state == pb.RequestRecord.STATE_RUNNING
            assert (waiting.state, waiting.queued.position) == (pb.RequestRecord.STATE_QUEUED, 1)
            assert "slot" in waiting.queued.reason
            assert [one.gate != "" for one in waiting.decisions[0].candidates] == [True]
            assert (await mesh.requests.requests()).total_count == 2

            receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_COMPLETED)
            receipt.usage.prompt_tokens, receipt.usage.completion_tokens = 7, 3
            await first.report_finished(Reason.UNSPECIFIED, receipt)
            while not (await second.next_decision()).HasField("granted"):
                pass
            await second.report_finished(Reason.UNSPECIFIED, receipt)
        done = await mesh.told("r-2")
        assert (done.state, done.reason, done.receipt) == (pb.RequestRecord.STATE_ENDED, 0, receipt)
        assert kinds(done) == [pb.DecisionRecord.KIND_QUEUED, pb.DecisionRecord.KIND_PLACED]
        placed = done.decisions[-1]
        assert [(one.model, one.runner, one.chosen) for one in placed.candidates] == [("qwen", "titan", True)]
        assert placed.policy == "least_loaded"
        (client,) = (await mesh.requests.clients()).clients
        assert (client.client_id, client.running_count, client.token_count) == ("nightly", 0, 10)
        page = generate_latest(mesh.metrics.page).decode()
        assert 'weft_router_grants_total{model="qwen",priority="low"} 1.0' in page
        assert 'weft_router_requests_total{model="qwen",outcome="completed",reason="completed"} 2.0' in page


@pytest.mark.parametrize("is_remote", [False, True])
async def test_request_over_the_limit_is_rejected_before_the_queue_and_recorded(
    tmp_path: Path, is_remote: bool
) -> None:
    limits = RateLimitConfig(default=(Rate(1, 60),))
    async with router(limits) as mesh, both_ways(mesh, tmp_path, is_remote=is_remote) as (port, _):
        async with port.place(asked("r-1")) as place:
            assert (await place.next_decision()).HasField("granted")
        async with port.place(asked("r-2", client_id="nightly", names_priority=False)) as place:
            with pytest.raises(WeftError, match="Tenant a exceeded 1 req/min") as refused:
                await place.next_decision()
        assert refused.value.reason is Reason.RATE_LIMIT_EXCEEDED
        assert {"limit": "1", "remaining": "0"}.items() <= refused.value.metadata.items()
        assert "resetAt" in refused.value.metadata
        assert refused.value.retry_after_seconds is not None
        record = await mesh.told("r-2")
        assert (record.state, record.reason) == (pb.RequestRecord.STATE_ENDED, Reason.RATE_LIMIT_EXCEEDED.value)
        assert record.priority == Priority.LOW.wire, "as its client's profile says"


def conditional_view() -> FleetView:
    """A route to hard requests' model on labeled runners, then one for callers with half of their limit, then any."""
    names = ("large", "medium", "small")
    manifest = RouteManifest(name="by-difficulty", candidates=names)
    manifest.conditions.add(candidate="large", labels={"difficulty": "hard"}, runner_labels={"zone": "office"})
    manifest.conditions.add(candidate="medium", min_budget_percent=50)
    runners = {
        name: runner_view(name, instances={name: ready(name, slots=9)}, labels=frozenset({"zone=office"}))
        for name in names
    }
    models = {name: model_view(name, name) for name in names}
    return FleetView(1, runners, models, routes={manifest.name: Route(manifest=manifest)})


async def test_labels_and_the_budget_left_choose_the_candidate_of_a_route_and_are_recorded(tmp_path: Path) -> None:
    limits = RateLimitConfig(default=(Rate(3, 60),))
    answered = []
    async with router(limits, conditional_view()) as mesh, both_ways(mesh, tmp_path, is_remote=True) as (port, _):
        for number, label in enumerate(("hard", "easy", "easy"), 1):
            wanted = asked(f"r-{number}", model="route/by-difficulty", labels=frozenset({f"difficulty={label}"}))
            async with port.place(wanted) as place:
                answered.append((await place.next_decision()).granted.model)
        quoted = await mesh.placement.quote(replace(wanted, request_id="r-4"))
        record = await mesh.told("r-3")
    assert answered == ["large", "small", "small"]
    assert {one.model: one.gate for one in record.decisions[-1].candidates} == {
        "large": "takes requests labeled difficulty=hard",
        "medium": "takes requests while at least 50% of the rate limit is left",
        "small": "",
    }
    assert [quote.model for quote in quoted] == ["small"]


async def test_failed_attempt_is_recorded_as_a_decision() -> None:
    async with router() as mesh, mesh.placement.place(asked("r-1", seconds_left=5.0)) as place:
        attempt = (await place.next_decision()).granted.attempt
        await place.report_attempt_failed(attempt, Reason.NO_SLOT_AVAILABLE)
        assert pb.DecisionRecord.KIND_FAILED in kinds(await mesh.told("r-1")), "it is not placed again yet"


async def test_disconnected_caller_is_cancelled_and_nothing_stays_running() -> None:
    async with router() as mesh:
        async with mesh.placement.place(asked("r-1")) as first:
            await first.next_decision()
            is_told = asyncio.Event()
            waiting = asyncio.create_task(_wait_for_a_place(mesh, is_told))
            await is_told.wait()
            assert (await mesh.requests.requests()).total_count == 2
            waiting.cancel()
            await asyncio.wait({waiting})
        assert (await mesh.told("r-2")).reason == Reason.CANCELLED.value
        assert (await mesh.requests.requests()).total_count == 0


async def _wait_for_a_place(mesh: Router, is_told: asyncio.Event) -> None:
    async with mesh.placement.place(asked("r-2")) as place:
        while True:
            await place.next_decision()
            is_told.set()


async def test_request_running_at_router_stop_is_not_recorded_as_cancelled() -> None:
    """Its dispatcher hangs up, and goes on with its runner: what is in the database stays a request under way."""
    async with router() as mesh:
        mesh.books.requests.unwritten.keep(100)
        runs, waits, left = (mesh.placement.place(asked(f"r-{number}")) for number in range(3))
        async with runs, waits:
            async with left:
                await runs.next_decision()
                await waits.next_decision()
                await left.next_decision()
            mesh.loop.close()
        taken = mesh.books.requests.unwritten.take(100)
        # A caller that left before is one that left.
        assert [(each.request_id, each.reason) for each in taken.ended] == [("r-2", Reason.CANCELLED)]
        assert [each.spec.request_id for each in taken.begun] == ["r-0", "r-1"]
        assert len(mesh.books.requests._under_way) == 0
