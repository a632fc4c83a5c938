"""The table of endpoints: its rows agree with each other and with the documentation."""

from pathlib import Path

import pytest

from gateway.auth.authentication import AccessRules
from gateway.endpoints import ACCESS_RULES, GATEWAY_GROUPS, RUNNER_GROUPS, docs_table, endpoints_of
from weft.kernel.principal import Access, Resource, Role

_DOCS = Path(__file__).parents[3] / "docs" / "http-api.md"


def test_the_documentation_has_the_table_of_endpoints() -> None:
    written = _DOCS.read_text().partition("<!-- endpoints -->\n")[2].partition("<!-- end of endpoints -->")[0]
    assert written.strip() == docs_table().strip(), "put docs_table() of gateway/endpoints.py between the two comments"


@pytest.mark.parametrize("groups", [GATEWAY_GROUPS, RUNNER_GROUPS])
def test_no_endpoint_is_there_twice(groups: tuple[object, ...]) -> None:
    rows = [(method, row.path) for row in endpoints_of(groups) for method in row.methods]  # type: ignore[arg-type]
    assert len(rows) == len(set(rows))


def test_each_endpoint_asks_for_the_access_of_its_row() -> None:
    for row in endpoints_of((*GATEWAY_GROUPS, *RUNNER_GROUPS)):
        for method in row.methods:
            assert ACCESS_RULES.access_of(method, row.path) == row.access


def test_methods_without_an_endpoint_ask_for_the_role_that_goes_with_the_method() -> None:
    assert ACCESS_RULES.access_of("GET", "/v1/chat/completions") == Access(Resource.INFERENCE, Role.VIEW)
    assert ACCESS_RULES.access_of("DELETE", "/v1/chat/completions/x") == Access(Resource.INFERENCE, Role.EDIT)
    assert ACCESS_RULES.access_of("POST", "/metrics") is None


def test_paths_under_one_beginning_cannot_ask_for_different_access() -> None:
    rows = [
        ("GET", "/v1/things", Access(Resource.MODELS, Role.VIEW)),
        ("GET", "/v1/things/{name}", Access(Resource.KEYS, Role.VIEW)),
    ]
    with pytest.raises(ValueError, match="another path under /v1/things"):
        AccessRules(rows)
