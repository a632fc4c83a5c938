"""The routes of gateway and runner: they agree with each other and with the documentation."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.endpoints import GATEWAY_ROUTERS, RUNNER_ROUTERS, docs_table
from gateway.routing import ApiRouter, needs_of, routes_of

_DOCS = Path(__file__).parents[3] / "docs" / "http-api.md"


def test_the_documentation_has_the_table_of_endpoints() -> None:
    written = _DOCS.read_text().partition("<!-- endpoints -->\n")[2].partition("<!-- end of endpoints -->")[0]
    assert written.strip() == docs_table().strip(), "put docs_table() of gateway/endpoints.py between the two comments"


@pytest.mark.parametrize("routers", [GATEWAY_ROUTERS, RUNNER_ROUTERS])
def test_no_endpoint_is_there_twice(routers: Sequence[ApiRouter]) -> None:
    found = [(method, route.path) for route in routes_of(routers) for method in route.methods or ()]
    assert len(found) > 10
    assert len(found) == len(set(found))


def test_each_route_says_what_it_needs_of_a_key_and_few_need_none() -> None:
    found = [(route, needs_of(route)) for route in routes_of((*GATEWAY_ROUTERS, *RUNNER_ROUTERS))]
    assert {route.path for route, needs in found if needs.is_open} == {
        *("/", "/health", "/livez", "/healthz", "/readyz", "/ca.pem"),
        *("/ui", "/ui/{path:path}", "/api/v1/caller", "/docs", "/v1/results/{id}"),
    }
    assert {route.path for route, needs in found if needs.key} == {"/api/v1/watch"}
