"""Which names the error for an unknown name tells its caller."""

from types import MappingProxyType

import pytest

from gateway.visible_names import with_visible_names
from registry_svc.mesh.policy.declarations import in_use
from weft.dispatch.fleet import FleetView, expected_model
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.access.principal import LOCAL, Principal, parse_scopes
from weft.kernel.values.unknown_names import MODEL, SECRET, unknown_name

VIEW = FleetView(1, models=MappingProxyType({"qwen": expected_model("qwen", "", "titan")}))


@pytest.mark.parametrize("kind", ["alias", SECRET, "tenant"])
def test_error_for_a_non_requestable_kind_lists_no_models(kind: str) -> None:
    error = with_visible_names(unknown_name(kind, "nobody"), VIEW, LOCAL)
    assert "qwen" not in error.message
    assert "models" not in error.message


def test_refusal_of_a_resource_in_use_names_no_hidden_user() -> None:
    users = {
        ResourceKind.AGENT: {"boss", "team-coder"},
        ResourceKind.ALIAS: {"team-x", "boss-2"},
        ResourceKind.TRIAL: {"t1"},
    }
    for scopes, named in (
        (("models/team-*:edit",), {"agents": "team-coder", "aliases": "team-x", "trials": ""}),
        (("*:view",), {"agents": "boss,team-coder", "aliases": "boss-2,team-x", "trials": "t1"}),
    ):
        error = in_use(ResourceKind.MODEL, "team-m", users)
        caller = Principal(name="key:x", access=parse_scopes(scopes, "scopes"))
        found = with_visible_names(error, VIEW, caller)
        assert found.metadata == {"model": "team-m", **named}
        assert ("agents: boss, team-coder; by aliases: boss-2, team-x; by trials: t1" in found.message) is (
            "t1" in named["trials"]
        )
        assert found.message.startswith("the model 'team-m' is in use by agents: ")


def test_error_for_a_model_lists_the_models() -> None:
    assert (
        with_visible_names(unknown_name(MODEL, "nobody"), VIEW, LOCAL).message
        == "there is no model nobody; there is qwen"
    )
