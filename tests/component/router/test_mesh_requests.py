"""Records of requests at several routers, read through any of them."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest

from router_svc.mesh_requests import ENDED, MeshRequests
from router_svc.request_entry import EndedRequest
from router_svc.request_history import RequestHistory, StoredRequest
from router_svc.request_servicer import RequestServicer
from weft.api.router.v1 import figures_pb2, request_pb2, request_service_pb2, request_service_pb2_grpc
from weft.api.router.v1.request_service_pb2 import LimitUse
from weft.dispatch.fleet import FleetView, RouterView
from weft.dispatch.remote_router import UNDER_WAY, ListedRequests, RemoteRequests, RequestSource, Selection
from weft.dispatch.router_links import RouterLinks
from weft.kernel.clock import SystemClock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority
from weft.kernel.rpc import new_server, open_channel
from weft.kernel.timestamps import duration_of

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
RequestRecord = request_pb2.RequestRecord
Response = request_service_pb2.WatchRequestsResponse


def record(request_id: str, *, at: float = 0.0, reason: Reason | None = None) -> RequestRecord:
    made = RequestRecord(request_id=request_id, tenant="t", state=RequestRecord.STATE_RUNNING)
    made.arrive_time.FromDatetime(NOON + timedelta(seconds=at))
    if reason is not None:
        made.state = RequestRecord.STATE_ENDED
        made.end_time.FromDatetime(NOON + timedelta(seconds=at + 1))
        made.reason = reason.value  # type: ignore[assignment]  # same numbers
    return made


class Remembered(RequestSource):
    """The records of one router."""

    def __init__(self, *records: RequestRecord) -> None:
        self.records = list(records)
        self.cancelled: list[str] = []
        self.changes: asyncio.Queue[RequestRecord] = asyncio.Queue()

    async def request(self, request_id: str, tenant: str = "") -> RequestRecord:
        for each in self.records:
            if each.request_id == request_id and tenant in ("", each.tenant):
                return each
        raise WeftError(Reason.NOT_FOUND, f"no request {request_id} is known")

    async def requests(self, limit: int = 100, tenant: str = "", selection: Selection = UNDER_WAY) -> ListedRequests:
        return ListedRequests(requests=self.records[:limit], total=len(self.records))

    async def watch(self, tenant: str = "", ended_limit: int = 0) -> AsyncGenerator[Response]:
        yield Response(requests=self.records, synced=True)
        while True:
            yield Response(requests=[await self.changes.get()])

    async def cancel(self, request_id: str, tenant: str, cancelled_by: str) -> RequestRecord:
        found = await self.request(request_id, tenant)
        self.cancelled.append(request_id)
        return found

    async def clients(self) -> Sequence[request_pb2.ClientRecord]:
        return [request_pb2.ClientRecord(client_id="c", request_count=len(self.records))]

    async def limit_uses(self, tenant: str = "") -> Sequence[LimitUse]:
        shared = LimitUse(tenant="a", limit=9, used=len(self.records), window=duration_of(60))
        shared.reset.FromSeconds(len(self.records))
        return [shared, LimitUse(tenant="a", key=f"key:{len(self.records)}", limit=9, used=1)]

    async def figures(self) -> figures_pb2.Figures:
        return self._figures(4)

    async def watch_figures(self) -> AsyncGenerator[figures_pb2.Figures]:
        yield self._figures(3)
        yield self._figures(1)

    def _figures(self, count: int) -> figures_pb2.Figures:
        figures = figures_pb2.Figures(step_count=count, waiting=[1] * count, running=[2] * count)
        figures.step.FromSeconds(10)
        figures.start_time.FromDatetime(NOON)
        return figures


class SharedHistory(RequestHistory):
    """A database that routers share; `stored` are the ended requests by router."""

    is_shared = True

    def __init__(self, **stored: str) -> None:
        self.stored = stored
        self.is_away = False

    async def find(self, request_id: str, tenant: str) -> StoredRequest | None:
        raise AssertionError("each router looks for itself")

    async def older(
        self, limit: int, tenant: str, selection: Selection, before_number: int
    ) -> tuple[Sequence[EndedRequest], int]:
        raise AssertionError("each router adds its own")

    async def of_others(
        self, limit: int, tenant: str, selection: Selection, except_of: Iterable[str]
    ) -> tuple[Sequence[EndedRequest], int]:
        if self.is_away:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "away")
        known = set(except_of)
        found = [ended(name) for router, name in self.stored.items() if router not in known]
        return found[:limit], len(found)


def ended(request_id: str) -> EndedRequest:
    """Of a router that was killed while it went on."""
    return EndedRequest(
        key=1,
        request_id=request_id,
        tenant="t",
        client_id="",
        target="m",
        priority=Priority.NORMAL,
        arrived_at=0.0,
        arrived_wall=NOON,
        ended_at=1.0,
        reason=Reason.ROUTER_LOST,
        message="lost",
        decisions=b"",
    )


class Mesh:
    """One router here, and another one behind gRPC."""

    def __init__(self, own: Remembered, other: Remembered, links: RouterLinks, server: grpc.aio.Server) -> None:
        self.own, self.other, self.links = own, other, links
        self._server = server
        self.requests = MeshRequests(own, links, SystemClock())

    async def lose_other(self) -> None:
        await self._server.stop(grace=None)
        link = self.links.get("other")
        assert link is not None
        link.note_lost()


@asynccontextmanager
async def running(
    folder: Path, own: Sequence[RequestRecord] = (), other: Sequence[RequestRecord] = ()
) -> AsyncGenerator[Mesh]:
    there, server = Remembered(*other), new_server()
    # What it says of the whole mesh is not asked for: two routers that ask each other would never end.
    servicer = RequestServicer(there, mesh=Remembered(record("of-the-mesh")))
    request_service_pb2_grpc.add_RequestServiceServicer_to_server(servicer, server)
    address = f"unix:{folder}/other.sock"
    server.add_insecure_port(address)
    await server.start()
    links = RouterLinks(SystemClock(), own="own")
    routers = {
        "own": RouterView(name="own", incarnation="1", address="unix:/nowhere"),
        "other": RouterView(name="other", incarnation="1", address=address),
    }
    links.update_view(FleetView(1, routers=routers))
    # These tests say themselves when it is lost.
    link = links.get("other")
    assert link is not None
    await link._watch.stop()
    try:
        yield Mesh(Remembered(*own), there, links, server)
    finally:
        await links.close()
        await server.stop(grace=None)


async def test_a_request_is_found_wherever_it_is(tmp_path: Path) -> None:
    async with running(tmp_path, own=[record("a")], other=[record("b")]) as mesh:
        assert (await mesh.requests.request("a")).request_id == "a"
        assert (await mesh.requests.request("b")).request_id == "b"
        with pytest.raises(WeftError) as raised:
            await mesh.requests.request("of-the-mesh")
        assert raised.value.reason is Reason.NOT_FOUND


async def test_a_request_that_a_lost_router_may_know_is_not_said_to_be_unknown(tmp_path: Path) -> None:
    async with running(tmp_path, own=[record("a")]) as mesh:
        await mesh.lose_other()
        assert (await mesh.requests.request("a")).request_id == "a"
        with pytest.raises(WeftError, match="other cannot be reached") as raised:
            await mesh.requests.request("b")
        assert raised.value.reason is Reason.SERVICE_UNAVAILABLE


async def test_the_list_has_the_requests_of_all_routers_without_those_that_moved(tmp_path: Path) -> None:
    own = [record("a", at=1), record("b", at=2, reason=Reason.MOVED)]
    async with running(tmp_path, own=own, other=[record("b", at=0)]) as mesh:
        found = await mesh.requests.requests()
        assert [each.request_id for each in found.requests] == ["b", "a"]
        assert (found.total, list(found.unreachable_routers)) == (2, [])
        assert [(each.client_id, each.request_count) for each in await mesh.requests.clients()] == [("c", 3)]
        uses = [(each.key, each.used, each.reset.seconds) for each in await mesh.requests.limit_uses("a")]
        assert uses == [("", 3, 2), ("key:2", 1, 0), ("key:1", 1, 0)], "one window at two routers is one"


async def test_the_list_names_the_routers_that_do_not_answer(tmp_path: Path) -> None:
    async with running(tmp_path, own=[record("a")], other=[record("b")]) as mesh:
        await mesh.lose_other()
        found = await mesh.requests.requests()
        assert [each.request_id for each in found.requests] == ["a"]
        assert list(found.unreachable_routers) == ["other"]


async def test_the_list_of_ended_requests_has_those_of_routers_that_are_gone(tmp_path: Path) -> None:
    async with running(tmp_path, own=[record("a", at=5, reason=Reason.UNSPECIFIED)]) as mesh:
        history = SharedHistory(other="b", gone="c")
        mesh.requests.look_back_in(history)
        # What a router that answers has, it says itself.
        found = await mesh.requests.requests(selection=ENDED)
        assert ([each.request_id for each in found.requests], found.total) == (["a", "c"], 2)
        await mesh.lose_other()
        found = await mesh.requests.requests(selection=ENDED)
        assert ([each.request_id for each in found.requests], found.total) == (["a", "b", "c"], 3)
        assert not found.history_missing
        history.is_away = True
        found = await mesh.requests.requests(selection=ENDED)
        assert ([each.request_id for each in found.requests], found.history_missing) == (["a"], True)
        # Those that go on are in no database.
        assert [each.request_id for each in (await mesh.requests.requests()).requests] == ["a"]


async def test_a_database_of_this_router_alone_says_nothing_of_others(tmp_path: Path) -> None:
    async with running(tmp_path, own=[record("a", reason=Reason.UNSPECIFIED)]) as mesh:
        history = SharedHistory(gone="c")
        history.is_shared = False
        mesh.requests.look_back_in(history)
        found = await mesh.requests.requests(selection=ENDED)
        assert [each.request_id for each in found.requests] == ["a"]


async def test_a_watch_begins_with_the_ended_requests_of_routers_that_are_gone(tmp_path: Path) -> None:
    async with running(tmp_path, own=[record("a", at=5, reason=Reason.UNSPECIFIED)]) as mesh, asyncio.timeout(10):
        mesh.requests.look_back_in(SharedHistory(gone="c"))
        await mesh.lose_other()
        async with aclosing(mesh.requests.watch("", 10)) as responses:
            assert [each.request_id for each in (await anext(responses)).requests] == ["a", "c"]
            assert (await anext(responses)).synced
            await mesh.own.changes.put(record("d"))
            assert [each.request_id for each in (await anext(responses)).requests] == ["d"]
        async with aclosing(mesh.requests.watch()) as responses:
            assert "c" not in {each.request_id for each in (await anext(responses)).requests}


async def test_a_request_is_cancelled_where_it_runs(tmp_path: Path) -> None:
    async with running(tmp_path, other=[record("b")]) as mesh:
        await mesh.requests.cancel("b", "t", "somebody")
        assert mesh.other.cancelled == ["b"]
        with pytest.raises(WeftError) as raised:
            await mesh.requests.cancel("c", "t", "somebody")
        assert raised.value.reason is Reason.NOT_FOUND


async def test_a_watch_begins_with_what_all_have_and_goes_on_with_the_changes_of_each(tmp_path: Path) -> None:
    own = [record("a", at=1), record("e", at=0, reason=Reason.UNSPECIFIED)]
    async with (
        asyncio.timeout(10),
        running(tmp_path, own=own, other=[record("b", at=0)]) as mesh,
        aclosing(mesh.requests.watch("", 10)) as responses,
    ):
        first = await anext(responses)
        assert [each.request_id for each in first.requests] == ["b", "a", "e"]
        assert (await anext(responses)).synced
        await mesh.other.changes.put(record("c"))
        assert [each.request_id for each in (await anext(responses)).requests] == ["c"]
        # What the former owner says of a request that moved is no news.
        await mesh.own.changes.put(record("c", reason=Reason.MOVED))
        await mesh.own.changes.put(record("d"))
        assert [each.request_id for each in (await anext(responses)).requests] == ["d"]


async def test_a_watch_ends_when_the_mesh_has_other_routers(tmp_path: Path) -> None:
    async with running(tmp_path) as mesh, asyncio.timeout(10), aclosing(mesh.requests.watch()) as responses:
        assert (await anext(responses)).synced
        await mesh.lose_other()
        with pytest.raises(WeftError) as raised:
            await anext(responses)
        assert raised.value.reason in (Reason.WATCH_LAGGED, Reason.SERVICE_UNAVAILABLE)


async def test_figures_of_all_routers_are_added_and_a_reader_gets_each_step_once(tmp_path: Path) -> None:
    async with running(tmp_path) as mesh, asyncio.timeout(10):
        assert list((await mesh.requests.figures()).waiting) == [2, 2, 2, 2]
        shown = [each async for each in mesh.requests.watch_figures()]
        assert [list(each.running) for each in shown] == [[4, 4, 4, 4]]


async def test_over_grpc_a_router_answers_for_the_mesh_unless_it_is_asked_for_itself(tmp_path: Path) -> None:
    async with running(tmp_path, other=[record("b")]), open_channel(f"unix:{tmp_path}/other.sock") as channel:
        whole, alone = RemoteRequests(channel), RemoteRequests(channel, of_this_router=True)
        assert [each.request_id for each in (await whole.requests()).requests] == ["of-the-mesh"]
        assert [each.request_id for each in (await alone.requests()).requests] == ["b"]
