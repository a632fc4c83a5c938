"""How operators say what there should be."""

# ruff: noqa: N802 - the methods are called as in the contract

from typing import Any

import grpc

from registry_svc.checks import to_actor
from registry_svc.config import RegistryConfig
from registry_svc.mesh.declaration_messages import applied_message
from registry_svc.mesh.declaration_requests import to_batch
from registry_svc.mesh.declarations import Declarations
from registry_svc.mesh.requests import to_kind
from weft.api.registry.v1 import declaration_service_pb2, declaration_service_pb2_grpc
from weft.kernel.names import require_name
from weft.kernel.rpc import answering

Context = grpc.aio.ServicerContext[Any, Any]


class DeclarationServicer(declaration_service_pb2_grpc.DeclarationServiceServicer):
    """See DeclarationService in the contract."""

    def __init__(self, declarations: Declarations, config: RegistryConfig) -> None:
        self._declarations = declarations
        self._config = config

    async def Apply(
        self, request: declaration_service_pb2.ApplyRequest, context: Context
    ) -> declaration_service_pb2.ApplyResponse:
        """See the contract."""
        async with answering(context):
            results = await self._declarations.apply(to_batch(request, self._config))
            return declaration_service_pb2.ApplyResponse(results=[applied_message(each) for each in results])

    async def Delete(
        self, request: declaration_service_pb2.DeleteRequest, context: Context
    ) -> declaration_service_pb2.DeleteResponse:
        """See the contract."""
        async with answering(context):
            kind, name = to_kind(request.kind, "kind"), require_name(request.name, "name")
            await self._declarations.delete(kind, name, force=request.force, requested_by=to_actor("weft delete"))
            return declaration_service_pb2.DeleteResponse()
