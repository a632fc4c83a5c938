"""What operators are told, from the domain to the wire."""

from registry_svc.mesh.domain import AgentManifest, JoinToken, RouteManifest
from registry_svc.mesh.messages import (
    agent_manifest_message,
    kind_message,
    manifest_message,
    route_manifest_message,
    timestamp,
)
from registry_svc.mesh.wanted import (
    Applied,
    Declaration,
    ModelDeclaration,
    PoolDeclaration,
    RunnerDeclaration,
)
from weft.api.registry.v1 import declaration_service_pb2, join_token_service_pb2


def applied_message(applied: Applied) -> declaration_service_pb2.ApplyResult:
    """What became of one declaration."""
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


def token_message(token: JoinToken) -> join_token_service_pb2.JoinToken:
    """A token without its secret."""
    return join_token_service_pb2.JoinToken(
        id=token.id,
        description=token.description,
        create_time=timestamp(token.created_at),
        expire_time=timestamp(token.expires_at),
    )
