"""Whether a request may use tools that send bytes out of the mesh: the rules of remote models."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.api.registry.v1.tenant_pb2 import (
    REMOTE_PERMISSION_ALWAYS,
    REMOTE_PERMISSION_NEVER,
    REMOTE_PERMISSION_UNSPECIFIED,
    RemotePermission,
    Tenant,
)
from weft.dispatch.agents import skills_lacking_behind, usable_names
from weft.dispatch.fleet import FleetView
from weft.kernel.access.principal import MAY_LEAVE, Principal
from weft.kernel.access.rpc_auth import caller
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.capabilities import ThinkingMode, untaken_words
from weft.kernel.requests.request_values import Skill
from weft.kernel.values.names import AUTO_MODEL
from weft.kernel.values.unknown_names import unknown_target


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRules:
    """The permissions of tenants in weft.yaml."""

    default: RemotePermission.ValueType = REMOTE_PERMISSION_UNSPECIFIED
    """For tenants that are not listed."""
    tenants: Mapping[str, RemotePermission.ValueType] = field(default_factory=dict)

    def of_tenant(self, tenant: str) -> RemotePermission.ValueType:
        """Returns the permission of a tenant."""
        return self.tenants.get(tenant, self.default)


def require_target(view: FleetView, model: str) -> None:
    """Raises MODEL_NOT_FOUND for a name that nothing serves, before anything is done for a request to it."""
    if view.revision and model != AUTO_MODEL and model not in view.targets:
        raise unknown_target(model, usable_names(view.targets, caller()))


def require_tools(view: FleetView, model: str) -> None:
    """Raises MODALITY_UNSUPPORTED for a model that is known to call no tools, before a query leaves for it."""
    if Skill.TOOLS in skills_lacking_behind(view, model):
        words = untaken_words(frozenset({Skill.TOOLS}), frozenset(ThinkingMode), ThinkingMode.DEFAULT)
        raise WeftError(Reason.MODALITY_UNSUPPORTED, f"{model} {words}", metadata={"field": "model"})


def refusal(
    view: FleetView, rules: RemoteRules, tenant: str, principal: Principal, *, allow_remote: bool | None
) -> str:
    """Returns why a request may not send a query out of the mesh; empty: it may.

    `allow_remote`: the request's option. A request that offers the tool asks for it, so None counts as True.
    """
    known = view.tenants.get(tenant)
    permission = rules.of_tenant(tenant)
    if known is not None and (known.source == Tenant.SOURCE_DECLARED or tenant not in rules.tenants):
        permission = known.manifest.allow_remote
    if not view.revision:
        return "the permissions of tenants are not known yet"
    if permission == REMOTE_PERMISSION_NEVER:
        return "the tenant may not use remote providers"
    if allow_remote is False:
        return "'allow_remote' is false"
    if permission != REMOTE_PERMISSION_ALWAYS and not principal.may(MAY_LEAVE):
        return f"the key lacks the scope {MAY_LEAVE}"
    return ""
