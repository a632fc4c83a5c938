"""Requests with tickets over real processes: a router grants, a client carries them to the runner's HTTP API itself."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from apart_mesh import Apart
from mesh_process import eventually, fake_runner, run_weft, write_config

from router_svc.config import RouterConfig
from router_svc.service import RouterService, build
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import lane_service_pb2
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.placement import Grant, Placement, PlacementRequest
from weft.dispatch.tickets import TICKET_HEADER, ticket_text
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft.kernel.rpc import new_server
from weft_testing.free_port import free_port

ROUTER = "router-of-the-lane"
SECONDS = 30.0
LIGHT = {"registry": {"report_interval_seconds": 0.2}}


@dataclass
class LaneMesh:
    """A registry and the runner `a` as processes, and a router here that hears how attempts ended."""

    mesh: Apart
    router: RouterService
    url: str
    reports: list[tuple[ticket_pb2.TicketClaims, lane_service_pb2.AttemptReport]]
    http: aiohttp.ClientSession

    def note_attempt(self, claims: ticket_pb2.TicketClaims, report: lane_service_pb2.AttemptReport) -> bool:
        self.reports.append((claims, report))
        return True

    @asynccontextmanager
    async def granted(self, request_id: str) -> AsyncIterator[tuple[Placement, str]]:
        """The place of a request, and its ticket as the header has it."""
        request = PlacementRequest(
            request_id=request_id, tenant="ann", model="pool", operation=Operation.CHAT, report_to=ROUTER
        )
        async with self.router.placement.place(request) as place, asyncio.timeout(SECONDS):
            while not isinstance(decision := await place.next_decision(), Grant):
                pass
            yield place, ticket_text(decision.claims, decision.mac)
            await place.report_finished(Reason.UNSPECIFIED)

    def ask(self, ticket: str, *, stream: bool = False, tokens: int = 4) -> Any:
        body = {
            "model": "best",
            "stream": stream,
            "max_tokens": tokens,
            "messages": [{"role": "user", "content": "Count."}],
        }
        return self.http.post(f"{self.url}/v1/chat/completions", json=body, headers={TICKET_HEADER: ticket})

    async def reported(self, count: int) -> list[lane_service_pb2.AttemptReport]:
        """The reports, once there are so many."""

        async def enough() -> bool:
            return len(self.reports) >= count

        await eventually(enough, SECONDS, "a report is missing")
        return [report for _, report in self.reports]


@asynccontextmanager
async def lane_mesh(folder: Path, **switches: Any) -> AsyncIterator[LaneMesh]:
    config = write_config(folder, fake_runner("a", slots=2, **switches), **LIGHT)
    mesh, port = Apart(folder / "home", config), free_port()
    server = new_server()
    try:
        registry = mesh.start("registry")
        mesh.start("runner", "--http-port", str(port))
        address = f"unix:{folder}/router.sock"
        router = build(RouterConfig(registry_address=registry, name=ROUTER, address=address))
        async with aiohttp.ClientSession() as http:
            lane = LaneMesh(mesh, router, f"http://127.0.0.1:{port}", [], http)
            router.hear_attempts(lane)
            router.register(server)
            server.add_insecure_port(address)
            await router.start()
            await server.start()

            async def published() -> bool:
                known = router.view.runners.get("a")
                return known is not None and known.lane_url == lane.url

            await eventually(published, SECONDS, "the runner does not publish where it takes tickets")
            try:
                yield lane
            finally:
                await router.stop(0.0)
                await server.stop(None)
    finally:
        codes = mesh.end_all()
    assert set(codes) <= {0}


async def test_a_granted_request_is_answered_by_the_runner_and_reported_once(tmp_path: Path) -> None:
    async with lane_mesh(tmp_path) as lane:
        for number, stream in enumerate((False, True), start=1):
            async with lane.granted(f"req-{number}") as (_, ticket):
                async with lane.ask(ticket, stream=stream) as response:
                    assert (response.status, response.headers["x-request-id"]) == (200, f"req-{number}")
                    assert "tok3" in await response.text()
                async with lane.ask(ticket) as again:
                    assert (again.status, again.headers["x-weft-reason"]) == (503, "TICKET_INVALID")
        reports = await lane.reported(2)
        code, told, trouble = await run_weft("describe", "runner", "a", home=lane.mesh.home)
        assert code == 0, trouble
        assert len(lane.reports) == 2, "each end is reported once"
    assert [report.receipt.request_id for report in reports] == ["req-1", "req-2"]
    assert {report.receipt.outcome for report in reports} == {receipt_pb2.OUTCOME_COMPLETED}
    assert {claims.tenant for claims, _ in lane.reports} == {"ann"}
    assert f"proxies call {lane.url} (sidecar)" in told


@pytest.mark.parametrize("tokens", [0, 3])
async def test_an_engine_that_is_killed_is_a_status_before_its_first_token_and_an_event_after_it(
    tmp_path: Path, tokens: int
) -> None:
    async with lane_mesh(tmp_path, crash_after_tokens=tokens, tokens_per_second=50) as lane:
        async with lane.granted("req-1") as (_, ticket), lane.ask(ticket, stream=True, tokens=16) as response:
            text = await response.text()
        (report,) = await lane.reported(1)
    if tokens == 0:
        assert (response.status, response.headers["x-weft-reason"]) == (503, "SERVER_DIED")
    else:
        assert response.status == 200
        assert '"server_died"' in text.splitlines()[-2]
        assert "[DONE]" not in text
    assert report.receipt.reason == Reason.SERVER_DIED.value
    assert report.HasField("time_to_first_content") == (tokens > 0)


async def test_a_runner_that_is_killed_cuts_the_answer_and_its_successor_refuses_the_old_ticket(
    tmp_path: Path,
) -> None:
    async with lane_mesh(tmp_path, tokens_per_second=5, answer_tokens=0) as lane:
        async with lane.granted("req-1") as (_, ticket), lane.granted("req-2") as (_, unused):
            async with lane.ask(ticket, stream=True, tokens=500) as response:
                assert response.status == 200
                await response.content.readline()
                await asyncio.to_thread(lane.mesh.end, "runner", signal.SIGKILL)
                with pytest.raises(aiohttp.ClientError):
                    await response.read()
            port = lane.url.rpartition(":")[2]
            await asyncio.to_thread(lane.mesh.start, "runner", "--http-port", port)

            async def refused() -> str:
                async with lane.ask(unused) as response:
                    reason = response.headers.get("x-weft-reason", "")
                    assert response.status == 503
                    return reason if reason != "BACKEND_NOT_READY" else ""

            assert await eventually(refused, SECONDS, "the runner has no session") == "TICKET_INVALID"
        assert lane.reports == [], "who was killed reports nothing"
