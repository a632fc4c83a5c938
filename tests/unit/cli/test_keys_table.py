"""The roles and tables of keys, and the table of join tokens."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from weft.api.registry.v1 import join_token_service_pb2, key_service_pb2
from weft.documents.codec import document_of
from weft.kernel.access.principal import Access, Resource, Role, parse_scopes
from weft_app.cli import join_tokens, keys
from weft_app.cli.completion import KEYS
from weft_app.cli.keys import KeyRole, scopes_of


def _access(role: KeyRole) -> frozenset[Access]:
    mine = [resource for resource in Resource if resource is not Resource.MESH]
    every = {Access(resource, each) for resource in mine for each in Role}
    match role:
        case KeyRole.USER:
            words = {"inference:create", "inference:edit", "inference:view", "models:view"}
            return frozenset(access for access in every if str(access) in words)
        case KeyRole.VIEWER:
            return frozenset(access for access in every if access.role is Role.VIEW)
        case KeyRole.OPERATOR:
            return frozenset(access for access in every if access.resource not in (Resource.KEYS, Resource.SECRETS))
        case KeyRole.SERVICE:
            return frozenset(Access(resource, each) for resource in Resource for each in Role)
        case _:
            return frozenset(every)


@pytest.mark.parametrize("role", KeyRole)
def test_role_is_a_set_of_scopes_that_can_be_extended(monkeypatch: pytest.MonkeyPatch, role: KeyRole) -> None:
    assert parse_scopes(scopes_of(role), "scopes") == _access(role)
    asked: list[dict[str, Any]] = []

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == KEYS
        asked.append(body)
        return {"kind": "ApiKey", "id": "k", "key": "weft_k_s", "scopes": body["scopes"]}

    monkeypatch.setattr(keys, "connect", lambda *_: nullcontext(SimpleNamespace(post=post)))
    more = ["--scope", "mesh:view", "--scope", scopes_of(role)[0]]
    ran = CliRunner().invoke(keys.app, ["create", "--role", role.value, *more, "-o", "name"])
    assert (ran.exit_code, ran.output) == (0, "weft_k_s\n")
    assert asked[0]["scopes"] == [*scopes_of(role), "mesh:view"]


@pytest.mark.parametrize("output", ["table", "json", "name"])
def test_key_without_tenant_or_id_is_listed(monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    answer = key_service_pb2.ListKeysResponse(keys=[key_service_pb2.Key(scopes=["models:view"])])
    monkeypatch.setattr(keys, "connect", _answering(document_of(answer)))
    ran = CliRunner().invoke(keys.app, ["list", "-o", output])
    assert ran.exit_code == 0, ran.output
    assert ("models:view" in ran.output) is (output != "name")


def test_join_token_without_an_id_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    token = join_token_service_pb2.JoinToken(description="a laptop")
    answer = join_token_service_pb2.ListJoinTokensResponse(join_tokens=[token])
    monkeypatch.setattr(join_tokens, "connect", _answering(document_of(answer)))
    ran = CliRunner().invoke(join_tokens.app, ["list"])
    assert ran.exit_code == 0, ran.output
    assert "a laptop" in ran.output


def _answering(document: Any) -> Any:
    return lambda *_, **__: nullcontext(SimpleNamespace(get=lambda _: document))
