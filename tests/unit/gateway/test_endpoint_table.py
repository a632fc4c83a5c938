"""The routes of gateway and runner: they agree with each other."""

from collections.abc import Sequence

import pytest

from gateway.endpoints import GATEWAY_ROUTERS, RUNNER_ROUTERS, docs_table
from gateway.routing import ApiRouter, routes_of


def test_endpoint_table_shows_who_serves_an_endpoint_and_what_it_needs() -> None:
    rows = docs_table().splitlines()
    assert "| `POST /v1/chat/completions` | `inference:create` | gateway, runner |" in rows
    assert "| `GET, HEAD /livez` | `none` | gateway, runner |" in rows


@pytest.mark.parametrize("routers", [GATEWAY_ROUTERS, RUNNER_ROUTERS])
def test_endpoints_are_unique(routers: Sequence[ApiRouter]) -> None:
    found = [(method, route.path) for route in routes_of(routers) for method in route.methods or ()]
    assert len(found) > 10
    assert len(found) == len(set(found))
