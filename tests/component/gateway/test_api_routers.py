"""GET /api/v1/routers."""

from gateway_script import FixedFleet, serving
from google.protobuf.timestamp_pb2 import Timestamp

from weft.api.registry.v1.router_pb2 import Router
from weft.dispatch.fleet import FleetView

ROUTERS = "/api/v1/routers"
FIRST = Router(
    name="r1",
    incarnation="a",
    address="10.0.0.1:7071",
    version="0.1.0",
    register_time=Timestamp(seconds=1795180000),
    leading=True,
)
SECOND = Router(name="r2", incarnation="b", address="10.0.0.2:7071")


async def test_routers_are_listed_by_name_with_the_leader() -> None:
    routers = {each.name: each for each in (SECOND, FIRST)}
    async with serving(fleet=FixedFleet(FleetView(1, {}, {}, routers=routers))) as gateway:
        response = await gateway.request("GET", ROUTERS)
    answer = response.json
    assert answer["kind"] == "RouterList"
    items = answer["items"]
    assert [(item["name"], item["leading"]) for item in items] == [("r1", True), ("r2", False)]
    assert items[0] == {
        "kind": "router",
        "name": "r1",
        "incarnation": "a",
        "address": "10.0.0.1:7071",
        "version": "0.1.0",
        "leading": True,
        "registeredAt": "2026-11-20T13:06:40Z",
    }
