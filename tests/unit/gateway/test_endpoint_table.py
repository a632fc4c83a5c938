"""The routes of gateway and runner: they agree with each other."""

from collections.abc import Sequence

import pytest

from gateway.endpoints import GATEWAY_ROUTERS, RUNNER_ROUTERS, docs_table
from gateway.routing import ApiRouter, needs_of, routes_of


def test_endpoint_table_shows_who_serves_an_endpoint_and_what_it_needs() -> None:
    rows = docs_table().splitlines()
    assert "| `POST /v1/chat/completions` | `inference:create` | gateway, runner |" in rows
    assert "| `GET, HEAD /livez` | `none` | gateway, runner |" in rows


@pytest.mark.parametrize("routers", [GATEWAY_ROUTERS, RUNNER_ROUTERS])
def test_endpoints_are_unique(routers: Sequence[ApiRouter]) -> None:
    found = [(method, route.path) for route in routes_of(routers) for method in route.methods or ()]
    assert len(found) > 10
    assert len(found) == len(set(found))


def test_each_route_declares_its_key_requirements_and_few_need_none() -> None:
    found = [(route, needs_of(route)) for route in routes_of((*GATEWAY_ROUTERS, *RUNNER_ROUTERS))]
    assert {route.path for route, needs in found if needs.is_open} == {
        *("/", "/health", "/livez", "/healthz", "/readyz", "/ca.pem"),
        *("/ui", "/ui/{path:path}", "/api/v1/caller", "/docs", "/v1/results/{id}"),
    }
    assert {route.path for route, needs in found if needs.key} == {"/api/v1/watch"}
