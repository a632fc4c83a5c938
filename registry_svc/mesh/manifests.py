"""Manifests and declarations as callers send them: checked, and brought to the canonical form in which they are stored.

What a value may be is said by the rules of its field (`weft.kernel.field_rules`); here is what concerns several fields.
Each `valid_*` changes a message that just arrived in place and returns it: equal meanings are equal messages then, and
what a newer caller added is dropped.
"""

from collections.abc import Callable, Sequence

from registry_svc.config import RegistryConfig
from registry_svc.load_options import check_options
from registry_svc.mesh.providers import to_canonical_provider
from registry_svc.mesh.records import name_of
from registry_svc.wire_values import require_at_most
from weft.api.common.v1 import agent_behaviour_pb2
from weft.api.registry.v1 import (
    agent_pb2,
    alias_pb2,
    declaration_service_pb2,
    model_pb2,
    profile_pb2,
    route_pb2,
    tenant_pb2,
    wake_pb2,
    workflow_pb2,
)
from weft.dispatch.workflow_graph import to_canonical_workflow
from weft.documents.profiles import declarations_of, load_options_of, profile_field
from weft.documents.selectors import require_labels
from weft.kernel.alias_rules import check_alias
from weft.kernel.errors import invalid_field
from weft.kernel.field_rules import check_message
from weft.kernel.names import require_no_id
from weft.kernel.tenant_rules import to_canonical_limits
from weft.kernel.timestamps import duration_of
from weft.kernel.units import keep_alive_seconds
from weft.wake.recipes import set_defaults


def valid_model(manifest: model_pb2.ModelManifest, field: str, *, published: bool) -> model_pb2.ModelManifest:
    """Return a valid model; raises INVALID_ARGUMENT naming the field. `published`: sent by a runner."""
    check_message(manifest, field)
    require_no_id(manifest.name, f"{field}.name")
    require_no_id(manifest.pool_name, f"{field}.pool_name")
    manifest.DiscardUnknownFields()
    manifest.operations[:] = sorted(set(manifest.operations))
    manifest.skills[:] = sorted(set(manifest.skills))
    if manifest.HasField("wake"):
        _check_wake(manifest.wake, f"{field}.wake", published=published)
        set_defaults(manifest.wake)
    _valid_tags(manifest, field)
    if manifest.HasField("provider") and published:
        raise invalid_field(f"{field}.provider", "a runner publishes no provider; an operator declares it with apply")
    return manifest


def valid_agent(manifest: agent_pb2.AgentManifest, field: str) -> agent_pb2.AgentManifest:
    """Return a valid agent; raises INVALID_ARGUMENT naming the field."""
    check_message(manifest, field)
    require_no_id(manifest.name, f"{field}.name")
    manifest.DiscardUnknownFields()
    if not manifest.default_params.ByteSize():
        manifest.ClearField("default_params")
    _drop_defaults(manifest.behaviour)
    if not manifest.behaviour.ByteSize():
        manifest.ClearField("behaviour")
    _valid_tags(manifest, field)
    return manifest


def _valid_tags(manifest: model_pb2.ModelManifest | agent_pb2.AgentManifest, field: str) -> None:
    """Clear tags that say nothing. Raise INVALID_ARGUMENT for a label that selectors would take for a field."""
    require_labels(manifest.tags, f"{field}.tags.labels")
    if not manifest.tags.ByteSize():
        manifest.ClearField("tags")


def _drop_defaults(behaviour: agent_behaviour_pb2.AgentBehaviour) -> None:
    """Clear what is as it is anyway: absent and default are one."""
    if behaviour.stop_on_decision_request:
        behaviour.ClearField("stop_on_decision_request")
    if behaviour.parse_text_tool_calls:
        behaviour.ClearField("parse_text_tool_calls")


def valid_route(manifest: route_pb2.RouteManifest, field: str) -> route_pb2.RouteManifest:
    """Return a valid route; raises INVALID_ARGUMENT naming the field."""
    check_message(manifest, field)
    require_no_id(manifest.name, f"{field}.name")
    manifest.DiscardUnknownFields()
    if manifest.HasField("budget"):
        manifest.budget.FromNanoseconds(manifest.budget.ToNanoseconds())
    if manifest.HasField("keep_alive"):
        seconds = keep_alive_seconds(manifest.keep_alive.ToNanoseconds() / 1e9, f"{field}.keep_alive")
        manifest.keep_alive.CopyFrom(duration_of(seconds))
    return manifest


def valid_alias(manifest: alias_pb2.AliasManifest, field: str) -> alias_pb2.AliasManifest:
    """Return a valid alias with its pattern; raises INVALID_ARGUMENT naming the field."""
    check_message(manifest, field)
    manifest.DiscardUnknownFields()
    check_alias(manifest.name, manifest.pattern, manifest.target, manifest.tenant, field)
    manifest.pattern = manifest.pattern or manifest.name
    return manifest


def valid_workflow(manifest: workflow_pb2.WorkflowManifest, field: str) -> workflow_pb2.WorkflowManifest:
    """Return a valid workflow; raises INVALID_ARGUMENT naming the field, such as "inputs[2].node"."""
    check_message(manifest, field)
    require_no_id(manifest.name, f"{field}.name")
    manifest.DiscardUnknownFields()
    to_canonical_workflow(manifest.workflow, f"{field}.workflow")
    return manifest


def valid_tenant(manifest: tenant_pb2.TenantManifest, field: str) -> tenant_pb2.TenantManifest:
    """Return a valid tenant; raises INVALID_ARGUMENT naming the field, such as "limits[2].window"."""
    check_message(manifest, field)
    manifest.DiscardUnknownFields()
    to_canonical_limits(manifest, field)
    return manifest


def _check_wake(wake: wake_pb2.Wake, field: str, *, published: bool) -> None:
    """Raise INVALID_ARGUMENT naming the field of a plan that cannot be carried out, or not by routers."""
    if not wake.by_runner and not wake.HasField("by_mesh"):
        raise invalid_field(field, "must say who wakes it: by_runner, by_mesh or both")
    recipe, field = wake.by_mesh, f"{field}.by_mesh"
    # A router would substitute them: any publisher of a model could have its secrets sent to any URL.
    if published and any("${" in value for value in recipe.http.headers.values()):
        raise invalid_field(
            f"{field}.http.headers",
            "a runner may not use the routers' variables; an operator must declare this recipe with apply",
        )
    if not recipe.HasField("command"):
        return
    # A router would run it: any publisher of a model could run programs on another machine.
    if published:
        raise invalid_field(
            f"{field}.command",
            "a runner may not have routers run a program; an operator must declare this recipe with apply",
        )
    if not recipe.command.argv[0]:
        raise invalid_field(f"{field}.command.argv", "must be a program and its arguments")


def valid_batch(
    request: declaration_service_pb2.ApplyRequest, config: RegistryConfig
) -> declaration_service_pb2.ApplyRequest:
    """Return a valid Apply, no two declarations of one name; raises INVALID_ARGUMENT naming the field."""
    require_at_most(request.declarations, "declarations", config.max_declarations)
    for index, declaration in enumerate(request.declarations):
        _check_declaration(declaration, f"declarations[{index}]", config)
        declaration.DiscardUnknownFields()
    require_at_most(request.expected, "expected", config.max_declarations)
    for index, expected in enumerate(request.expected):
        _check_declaration(expected, f"expected[{index}]", config)
    _require_one_namespace(request.declarations)
    return request


def _check_declaration(declaration: declaration_service_pb2.Declaration, field: str, config: RegistryConfig) -> None:
    match declaration.WhichOneof("resource"):
        case "model":
            _valid_declared_model(declaration.model, f"{field}.model")
        case "agent":
            valid_agent(declaration.agent, f"{field}.agent")
        case "route":
            valid_route(declaration.route, f"{field}.route")
        case "alias":
            valid_alias(declaration.alias, f"{field}.alias")
        case "profile":
            valid_profile(declaration.profile, f"{field}.profile", config)
        case "workflow":
            valid_workflow(declaration.workflow, f"{field}.workflow")
        case "tenant":
            valid_tenant(declaration.tenant, f"{field}.tenant")
        case "pool":
            require_at_most(declaration.pool.members, f"{field}.pool.members", config.max_models)
        case None:
            raise invalid_field(
                field,
                "must be a model, an agent, a runner, a pool, a route, an alias, a profile, a workflow or a tenant",
            )
    check_message(declaration, field)


def _valid_declared_model(model: model_pb2.ModelDeclaration, field: str) -> None:
    where = f"{field}.manifest"
    valid_model(model.manifest, where, published=False)
    if model.manifest.HasField("provider"):
        model.runner = to_canonical_provider(model.runner, model.manifest, where)


def valid_profile(manifest: profile_pb2.ProfileManifest, field: str, config: RegistryConfig) -> None:
    """Bring a profile to its canonical form; raises INVALID_ARGUMENT naming the field, such as "agents[0].name"."""
    check_message(manifest, field)
    require_no_id(manifest.name, f"{field}.name")
    manifest.DiscardUnknownFields()
    documents = declarations_of(manifest)
    if len(documents) > config.max_profile_documents:
        raise invalid_field(field, f"declares {len(documents)} documents; at most {config.max_profile_documents}")
    for index, model in enumerate(manifest.models):
        _valid_declared_model(model, f"{field}.models[{index}]")
    for index, agent in enumerate(manifest.agents):
        valid_agent(agent, f"{field}.agents[{index}]")
    for index, route in enumerate(manifest.routes):
        valid_route(route, f"{field}.routes[{index}]")
    for index, alias in enumerate(manifest.aliases):
        valid_alias(alias, f"{field}.aliases[{index}]")
    _require_one_namespace(declarations_of(manifest), lambda index: f"{field}.{profile_field(manifest, index)}")
    _check_loads(manifest, field)
    if manifest.ByteSize() > config.max_profile_bytes:
        raise invalid_field(field, f"must be at most {config.max_profile_bytes} bytes; it has {manifest.ByteSize()}")


def _check_loads(manifest: profile_pb2.ProfileManifest, field: str) -> None:
    loads = [each.model for each in manifest.load]
    for index, load in enumerate(manifest.load):
        if load.model in loads[:index]:
            raise invalid_field(f"{field}.load[{index}].model", f"must be named once; {load.model} is twice")
        if load.model in manifest.unload:
            raise invalid_field(f"{field}.unload", f"must not name {load.model}, which is to be loaded")
        check_options(load_options_of(load.settings), f"{field}.load[{index}].settings")
        if not load.settings.ByteSize():
            load.ClearField("settings")


def _declarations_field(index: int) -> str:
    return f"declarations[{index}]"


def _require_one_namespace(
    declarations: Sequence[declaration_service_pb2.Declaration], place: Callable[[int], str] = _declarations_field
) -> None:
    """No two of one name in one call; only a pool may be called like a model. `place`: the field of one of them."""
    owners: dict[tuple[str, str], int] = {}
    pools = {each.pool.name for each in declarations if each.HasField("pool")}
    pools |= {each.model.manifest.pool_name for each in declarations if each.HasField("model")}
    for index, declaration in enumerate(declarations):
        name, kind = name_of(declaration), declaration.WhichOneof("resource") or ""
        # Pools, aliases, profiles and tenants have namespaces of their own.
        space = kind if kind in {"pool", "alias", "profile", "tenant"} else ""
        earlier = owners.setdefault((space, name), index)
        if earlier != index:
            what = "also declared in this call" if kind == "pool" else f"also that of {place(earlier)}"
            raise invalid_field(place(index), f"its name is {what}")
        if not space and name in pools and kind != "model":
            raise invalid_field(place(index), "its name is also that of a pool in this call")
