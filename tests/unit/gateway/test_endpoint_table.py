"""The routes of gateway and runner: they agree with each other."""

from collections.abc import Sequence

import pytest
from starlette.routing import Match

from gateway.endpoints import docs_table, gateway_routers
from gateway.routing import ApiRouter, routes_of
from gateway.runner_api_service import runner_routers
from weft.extension import own_extensions


def test_endpoint_table_shows_who_serves_an_endpoint_and_what_it_needs() -> None:
    rows = docs_table(own_extensions(), runner_routers(own_extensions())).splitlines()
    assert "| `POST /v1/chat/completions` | `inference:create` | gateway, runner |" in rows
    assert "| `GET, HEAD /livez` | `none` | gateway, runner |" in rows


@pytest.mark.parametrize("routers", [gateway_routers(own_extensions()), runner_routers(own_extensions())])
def test_endpoints_are_unique(routers: Sequence[ApiRouter]) -> None:
    found = [(method, route.path) for route in routes_of(routers) for method in route.methods or ()]
    assert len(found) > 10
    assert len(found) == len(set(found))


@pytest.mark.parametrize("routers", [gateway_routers(own_extensions()), runner_routers(own_extensions())])
def test_routes_found_by_path_alone_are_those_that_fastapi_finds(routers: Sequence[ApiRouter]) -> None:
    routes = list(routes_of(routers))
    direct = {key for router in routers for key in router.direct}
    assert direct == {
        (method, route.path) for route in routes for method in route.methods or () if "{" not in route.path
    }
    for method, path in direct:
        scope = {"type": "http", "method": method, "path": path, "root_path": ""}
        first = next(route for route in routes if route.matches(scope)[0] is Match.FULL)
        assert (first.path, first.methods) == (path, {method})
