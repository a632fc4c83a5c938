"""Whether a request may send a query out of the mesh: the rules of remote models."""

from dataclasses import replace

import pytest

from gateway.server_tools.permission import RemoteRules, refusal
from weft.api.registry.v1 import tenant_pb2 as pb
from weft.dispatch.fleet import FleetView
from weft.kernel.access.principal import LOCAL, Principal

VIEW = FleetView(revision=1)
NO_SCOPE = Principal(name="key:k")
NEVER, ALWAYS, UNSET = pb.REMOTE_PERMISSION_NEVER, pb.REMOTE_PERMISSION_ALWAYS, pb.REMOTE_PERMISSION_UNSPECIFIED


def declared(permission: pb.RemotePermission.ValueType, source: pb.Tenant.Source.ValueType) -> FleetView:
    tenant = pb.Tenant(manifest=pb.TenantManifest(name="acme", allow_remote=permission), source=source)
    return replace(VIEW, tenants={"acme": tenant})


@pytest.mark.parametrize(
    ("rules", "principal", "allow_remote", "why"),
    [
        (RemoteRules(), LOCAL, None, ""),
        (RemoteRules(), LOCAL, True, ""),
        (RemoteRules(), LOCAL, False, "'allow_remote' is false"),
        (RemoteRules(), NO_SCOPE, None, "the key lacks the scope remote:create"),
        (RemoteRules(default=ALWAYS), NO_SCOPE, None, ""),
        (RemoteRules(default=ALWAYS), LOCAL, False, "'allow_remote' is false"),
        (RemoteRules(default=NEVER), LOCAL, True, "the tenant may not use remote providers"),
        (RemoteRules(default=NEVER, tenants={"acme": UNSET}), LOCAL, None, ""),
    ],
)
def test_query_leaves_with_the_permission_of_tenant_key_and_request(
    rules: RemoteRules, principal: Principal, allow_remote: bool | None, why: str
) -> None:
    assert refusal(VIEW, rules, "acme", principal, allow_remote=allow_remote) == why


def test_declared_tenant_has_precedence_over_the_configuration_and_that_over_anothers() -> None:
    rules = RemoteRules(tenants={"acme": ALWAYS})
    one = declared(NEVER, pb.Tenant.SOURCE_DECLARED)
    assert refusal(one, rules, "acme", LOCAL, allow_remote=None) == "the tenant may not use remote providers"
    of_registry = declared(NEVER, pb.Tenant.SOURCE_CONFIGURED)
    assert refusal(of_registry, rules, "acme", LOCAL, allow_remote=None) == ""
    assert refusal(of_registry, RemoteRules(), "acme", LOCAL, allow_remote=None) != ""


def test_nothing_leaves_before_tenants_are_known() -> None:
    assert "not known yet" in refusal(replace(VIEW, revision=0), RemoteRules(), "acme", LOCAL, allow_remote=None)
