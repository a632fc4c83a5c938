"""The gRPC servicer of profiles."""

from typing import Any

import grpc
from typing_extensions import override

from registry_svc.mesh.policy.ownership import Author
from registry_svc.operations.profiles import Profiles
from registry_svc.wire_values import cleaned_multiline, to_actor
from weft.api.registry.v1 import profile_service_pb2 as pb
from weft.api.registry.v1 import profile_service_pb2_grpc
from weft.documents.profiles import documents_of
from weft.documents.rights import names_secret
from weft.kernel.names import require_name
from weft.kernel.principal import OPERATE, USE_SECRETS
from weft.kernel.rpc import answering
from weft.kernel.rpc_auth import caller

Context = grpc.aio.ServicerContext[Any, Any]

MAX_DESCRIPTION_CHARS = 1_024


class ProfileServicer(profile_service_pb2_grpc.ProfileServiceServicer):
    """See ProfileService in the contract."""

    def __init__(self, profiles: Profiles) -> None:
        self._profiles = profiles

    @override
    async def SaveProfile(self, request: pb.SaveProfileRequest, context: Context) -> pb.SaveProfileResponse:
        async with answering(context):
            require_name(request.name, "name")
            request.description = cleaned_multiline(request.description, "description", MAX_DESCRIPTION_CHARS)
            known = caller()
            author = Author(name=request.requested_by if known.names_tenants else known.name)
            return pb.SaveProfileResponse(result=await self._profiles.save(request, author))

    @override
    async def SwitchProfile(self, request: pb.SwitchProfileRequest, context: Context) -> pb.SwitchProfileResponse:
        async with answering(context):
            require_name(request.name, "name")
            profile, known = self._profiles.get(request.name), caller()
            manifest = profile.manifest
            if manifest.load or manifest.unload or manifest.unload_others:
                known.require(OPERATE)
            if names_secret(documents_of(manifest)):
                known.require(USE_SECRETS)
            return await self._profiles.switch(request, to_actor(request.requested_by))
