"""Pools. They are derived from their models: a declaration is checked against them and changes nothing."""

from weft.api.registry.v1.declaration_service_pb2 import PoolDeclaration
from weft.api.registry.v1.pool_pb2 import Pool
from weft.documents.conditions import pool_conditions
from weft.documents.kind import Kind
from weft.documents.resource_kinds import ResourceKind

KIND = Kind(
    kind=ResourceKind.POOL,
    declared=PoolDeclaration,
    record=Pool,
    summary="A pool. Pools are defined by their models: `apply` only checks that it is as declared.",
    shares_namespace=False,
    conditions=pool_conditions,
)
