"""Manifests and declarations as callers send them: checked, and brought to the canonical form in which they are stored.

What a value may be is said by the rules of its field (`weft.kernel.field_rules`); here is what concerns several fields.
Each `valid_*` changes a message that just arrived in place and returns it: equal meanings are equal messages then, and
what a newer caller added is dropped.
"""

from collections.abc import Sequence

from registry_svc.config import RegistryConfig
from registry_svc.mesh.providers import to_canonical_provider
from registry_svc.mesh.records import name_of
from registry_svc.wire_values import require_at_most
from weft.api.common.v1 import agent_behaviour_pb2
from weft.api.registry.v1 import agent_pb2, alias_pb2, declaration_service_pb2, model_pb2, route_pb2, wake_pb2
from weft.documents.selectors import require_labels
from weft.kernel.alias_rules import check_alias
from weft.kernel.errors import FieldError, invalid_field
from weft.kernel.field_rules import check_message
from weft.kernel.names import require_no_id
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
            valid_model(declaration.model.manifest, f"{field}.model.manifest", published=False)
            if declaration.model.manifest.HasField("provider"):
                model, where = declaration.model, f"{field}.model.manifest"
                model.runner = to_canonical_provider(model.runner, model.manifest, where)
        case "agent":
            valid_agent(declaration.agent, f"{field}.agent")
        case "route":
            valid_route(declaration.route, f"{field}.route")
        case "alias":
            valid_alias(declaration.alias, f"{field}.alias")
        case "pool":
            require_at_most(declaration.pool.members, f"{field}.pool.members", config.max_models)
        case None:
            raise invalid_field(field, "must be a model, an agent, a runner, a pool, a route or an alias")
    check_message(declaration, field)


def _require_one_namespace(declarations: Sequence[declaration_service_pb2.Declaration]) -> None:
    """No two of one name in one call; only a pool may be called like a model."""
    owners: dict[str, int] = {}
    pools = {each.pool.name for each in declarations if each.HasField("pool")}
    pools |= {each.model.manifest.pool_name for each in declarations if each.HasField("model")}
    seen_pools: set[str] = set()
    seen_aliases: set[str] = set()
    for index, declaration in enumerate(declarations):
        name = name_of(declaration)
        if declaration.HasField("pool"):
            if name in seen_pools:
                raise _twice(index, "also declared in this call")
            seen_pools.add(name)
            continue
        if declaration.HasField("alias"):
            # Aliases have a namespace of their own.
            if name in seen_aliases:
                raise _twice(index, "also that of another alias in this call")
            seen_aliases.add(name)
            continue
        if name in owners:
            raise _twice(index, f"also that of declarations[{owners[name]}]")
        if name in pools and not declaration.HasField("model"):
            raise _twice(index, "also that of a pool in this call")
        owners[name] = index


def _twice(index: int, why: str) -> FieldError:
    return invalid_field(f"declarations[{index}]", f"its name is {why}")
