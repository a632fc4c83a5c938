"""GET /api/v1/routers."""

import json

from gateway_script import FixedFleet, model, serving

from weft.dispatch.domains import owner_of
from weft.dispatch.fleet import FleetView, RouterView

ROUTERS = "/api/v1/routers"
FIRST = RouterView(name="r1", incarnation="a", address="10.0.0.1:7071", version="0.1.0", registered=1795180000.0)
SECOND = RouterView(name="r2", incarnation="b", address="10.0.0.2:7071")
LEAVING = RouterView(name="r3", incarnation="c", address="10.0.0.3:7071", draining=True)


async def test_routers_are_listed_by_name_with_the_domains_that_each_owns() -> None:
    models = {name: model(name) for name in ("tiny", "small", "large", "vast")}
    routers = {each.name: each for each in (SECOND, LEAVING, FIRST)}
    async with serving(fleet=FixedFleet(FleetView(1, {}, models, routers=routers))) as gateway:
        response = await gateway.request("GET", ROUTERS)
    answer = json.loads(response.body)
    assert answer["kind"] == "RouterList"
    items = answer["items"]
    assert [item["name"] for item in items] == ["r1", "r2", "r3"]
    assert [item["draining"] for item in items] == [False, False, True]
    for item in items:
        owned = [key for key in sorted(models) if owner_of(key, routers.values()) == routers[item["name"]]]
        assert item["domains"] == owned
    assert items[2]["domains"] == [], "one that drains owns nothing"
    assert items[0] == {
        "kind": "router",
        "name": "r1",
        "incarnation": "a",
        "address": "10.0.0.1:7071",
        "version": "0.1.0",
        "draining": False,
        "registeredAt": "2026-11-20T13:06:40Z",
        "domains": items[0]["domains"],
    }


async def test_a_mesh_whose_routers_are_not_known_yet_lists_none() -> None:
    async with serving() as gateway:
        response = await gateway.request("GET", ROUTERS)
    assert json.loads(response.body) == {"kind": "RouterList", "items": []}


async def test_a_parameter_that_is_not_there_is_refused_by_name() -> None:
    async with serving() as gateway:
        response = await gateway.request("GET", f"{ROUTERS}?nmae=r1")
    assert response.status == 400
    assert "nmae" in json.loads(response.body)["error"]["message"]
