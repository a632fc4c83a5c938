"""Runners. They register themselves: a declaration checks that one exists, and changes nothing."""

from weft.api.registry.v1.declaration_service_pb2 import RunnerDeclaration
from weft.api.registry.v1.runner_pb2 import Runner
from weft.documents.conditions import runner_conditions
from weft.documents.kind import Kind
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.access.principal import Resource

KIND = Kind(
    kind=ResourceKind.RUNNER,
    declared=RunnerDeclaration,
    record=Runner,
    summary="A runner. Runners register themselves: `apply` only checks that it exists.",
    resource=Resource.RUNNERS,
    by_name=False,
    conditions=runner_conditions,
)
