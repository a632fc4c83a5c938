"""The tables of keys and join tokens."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from weft.api.registry.v1 import join_token_service_pb2, key_service_pb2
from weft.documents.codec import document_of
from weft_app.cli import join_tokens, keys


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
