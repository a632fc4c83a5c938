"""gRPC servicer of secrets."""

from typing import Any

import grpc
from typing_extensions import override

from registry_svc.secrets.secrets import Secrets
from weft.api.registry.v1 import secret_service_pb2 as pb
from weft.api.registry.v1 import secret_service_pb2_grpc
from weft.kernel.field_rules import check_message
from weft.kernel.rpc import answering
from weft.kernel.rpc_auth import caller

Context = grpc.aio.ServicerContext[Any, Any]


class SecretServicer(secret_service_pb2_grpc.SecretServiceServicer):
    """See SecretService in the contract."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets

    @override
    async def CreateSecret(self, request: pb.CreateSecretRequest, context: Context) -> pb.CreateSecretResponse:
        async with answering(context):
            check_message(request)
            return pb.CreateSecretResponse(secret=await self._secrets.create(request, caller()))

    @override
    async def ListSecrets(self, request: pb.ListSecretsRequest, context: Context) -> pb.ListSecretsResponse:
        del request
        async with answering(context):
            return pb.ListSecretsResponse(secrets=self._secrets.all())

    @override
    async def UpdateSecret(self, request: pb.UpdateSecretRequest, context: Context) -> pb.UpdateSecretResponse:
        async with answering(context):
            check_message(request)
            return pb.UpdateSecretResponse(secret=await self._secrets.update(request, caller()))

    @override
    async def DeleteSecret(self, request: pb.DeleteSecretRequest, context: Context) -> pb.DeleteSecretResponse:
        async with answering(context):
            check_message(request)
            await self._secrets.delete(request, caller())
            return pb.DeleteSecretResponse()
