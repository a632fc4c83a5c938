"""Declarations and the results of Apply, between the domain and the wire."""

from collections.abc import Sequence

from registry_svc.config import RegistryConfig
from registry_svc.mesh.domain import (
    AgentManifest,
    Applied,
    Batch,
    Declaration,
    ModelDeclaration,
    PoolDeclaration,
    RouteManifest,
    RunnerDeclaration,
)
from registry_svc.mesh.manifests import (
    agent_manifest_message,
    manifest_message,
    route_manifest_message,
    to_agent,
    to_manifest,
    to_route,
)
from registry_svc.mesh.messages import kind_message
from registry_svc.wire_values import require_at_most, require_unique
from weft.api.registry.v1 import declaration_service_pb2
from weft.kernel.errors import FieldError, invalid_field
from weft.kernel.names import require_name


def to_batch(request: declaration_service_pb2.ApplyRequest, config: RegistryConfig) -> Batch:
    """A valid Apply; raises INVALID_ARGUMENT naming the field."""
    require_at_most(request.declarations, "declarations", config.max_declarations)
    declarations = tuple(
        _declaration(each, f"declarations[{index}]", config) for index, each in enumerate(request.declarations)
    )
    _require_one_namespace(declarations)
    return Batch(declarations=declarations, dry_run=request.dry_run, adopt=request.adopt)


def _declaration(declaration: declaration_service_pb2.Declaration, field: str, config: RegistryConfig) -> Declaration:
    match declaration.WhichOneof("resource"):
        case "model":
            return _model(declaration.model, f"{field}.model")
        case "agent":
            return to_agent(declaration.agent, f"{field}.agent")
        case "route":
            return to_route(declaration.route, f"{field}.route")
        case "runner":
            return RunnerDeclaration(name=require_name(declaration.runner.name, f"{field}.runner.name"))
        case "pool":
            return _pool(declaration.pool, f"{field}.pool", config)
        case _:
            raise invalid_field(field, "must be a model, an agent, a runner, a pool or a route")


def _model(model: declaration_service_pb2.ModelDeclaration, field: str) -> ModelDeclaration:
    if model.runner:
        require_name(model.runner, f"{field}.runner")
    manifest = to_manifest(model.manifest, f"{field}.manifest", published=False)
    return ModelDeclaration(manifest=manifest, runner=model.runner)


def _pool(pool: declaration_service_pb2.PoolDeclaration, field: str, config: RegistryConfig) -> PoolDeclaration:
    require_at_most(pool.members, f"{field}.members", config.max_models)
    members = tuple(require_name(each, f"{field}.members[{index}]") for index, each in enumerate(pool.members))
    require_unique(members, f"{field}.members", "name")
    return PoolDeclaration(name=require_name(pool.name, f"{field}.name"), members=members)


def _require_one_namespace(declarations: Sequence[Declaration]) -> None:
    """No two of one name in one call; only a pool may be called like a model."""
    owners: dict[str, int] = {}
    pools = {each.name for each in declarations if isinstance(each, PoolDeclaration)}
    pools |= {each.manifest.pool_name for each in declarations if isinstance(each, ModelDeclaration)}
    seen_pools: set[str] = set()
    for index, declaration in enumerate(declarations):
        name = name_of(declaration)
        if isinstance(declaration, PoolDeclaration):
            if name in seen_pools:
                raise _twice(index, "also declared in this call")
            seen_pools.add(name)
            continue
        if name in owners:
            raise _twice(index, f"also that of declarations[{owners[name]}]")
        if name in pools and not isinstance(declaration, ModelDeclaration):
            raise _twice(index, "also that of a pool in this call")
        owners[name] = index


def name_of(declaration: Declaration) -> str:
    """The name of that which is declared."""
    return declaration.manifest.name if isinstance(declaration, ModelDeclaration) else declaration.name


def _twice(index: int, why: str) -> FieldError:
    return invalid_field(f"declarations[{index}]", f"its name is {why}")


def applied_message(applied: Applied) -> declaration_service_pb2.ApplyResult:
    """Return the result of one declaration, for the wire."""
    return declaration_service_pb2.ApplyResult(
        kind=kind_message(applied.kind),
        name=applied.name,
        outcome=declaration_service_pb2.ApplyResult.Outcome.ValueType(applied.outcome.value),
        before=None if applied.before is None else declaration_message(applied.before),
        after=declaration_message(applied.after),
    )


def declaration_message(declaration: Declaration) -> declaration_service_pb2.Declaration:
    """The wanted state of one resource."""
    message = declaration_service_pb2.Declaration()
    match declaration:
        case ModelDeclaration(manifest=manifest, runner=runner):
            message.model.manifest.CopyFrom(manifest_message(manifest))
            message.model.runner = runner
        case AgentManifest():
            message.agent.CopyFrom(agent_manifest_message(declaration))
        case RouteManifest():
            message.route.CopyFrom(route_manifest_message(declaration))
        case RunnerDeclaration(name=name):
            message.runner.name = name
        case PoolDeclaration(name=name, members=members):
            message.pool.name = name
            message.pool.members.extend(members)
    return message
