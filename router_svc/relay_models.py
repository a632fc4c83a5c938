"""Stored model files of the mesh's runners, for runners behind links: who has a model, and its files."""

from typing import TYPE_CHECKING, cast

import grpc
from google.protobuf.message import Message

from router_svc.relay_sessions import CALL_TIMEOUT_SECONDS, LinkSession
from weft.api.registry.v1 import registry_service_pb2, registry_service_pb2_grpc, runner_pb2
from weft.api.runner.v1 import runner_service_pb2, runner_service_pb2_grpc
from weft.documents.kinds import packed
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.channels.rpc import ChannelPool
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.address import RUNNER_KEY, metadata_of
from weft.kernel.values.names import require_name
from weft.link.frames import metadata_of as metadata_in
from weft.link.link import LinkCall

if TYPE_CHECKING:
    from weft.api.registry.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub
    from weft.api.runner.v1.runner_service_pb2_grpc import RunnerServiceAsyncStub


class ModelCalls:
    """Answers calls of runners with an open session. The runner that is called is named in the call's metadata."""

    def __init__(self, registry: grpc.aio.Channel, channels: ChannelPool) -> None:
        self._registry = cast("RegistryServiceAsyncStub", registry_service_pb2_grpc.RegistryServiceStub(registry))
        self._channels = channels

    async def list_runners(
        self, _: LinkCall, session: LinkSession, request: registry_service_pb2.ListResourcesRequest
    ) -> Message:
        """Returns the names and states of the mesh's runners, and which of them joined; nothing else of them."""
        _require_open(session)
        if request.kind != ResourceKind.RUNNER.value:
            raise WeftError(Reason.PERMISSION_DENIED, "a link may list runners only")
        found = await self._registry.ListResources(request, timeout=CALL_TIMEOUT_SECONDS)
        response = registry_service_pb2.ListResourcesResponse(next_page_token=found.next_page_token)
        for resource in found.resources:
            runner = runner_pb2.Runner()
            resource.content.Unpack(runner)
            known = runner_pb2.Runner(name=runner.name, status=runner.status, dial_out=runner.dial_out)
            response.resources.append(packed(ResourceKind.RUNNER, known))
        return response

    async def find(
        self, call: LinkCall, session: LinkSession, request: runner_service_pb2.FindStoredModelRequest
    ) -> Message:
        """Returns the model of a source that another runner has. Raises as the runner."""
        stub, metadata = await self._other(call, session)
        return await stub.FindStoredModel(request, metadata=metadata, timeout=CALL_TIMEOUT_SECONDS)

    async def read(
        self, call: LinkCall, session: LinkSession, request: runner_service_pb2.ReadModelFileRequest
    ) -> None:
        """Sends a file of another runner. Raises as the runner."""
        stub, metadata = await self._other(call, session)
        # Without a timeout: the link's call ends with it, and its caller bounds the pauses.
        reading = stub.ReadModelFile(request, metadata=metadata)
        try:
            async for part in reading:
                await call.send(part.SerializeToString())
        finally:
            reading.cancel()

    async def _other(
        self, call: LinkCall, session: LinkSession
    ) -> "tuple[RunnerServiceAsyncStub, tuple[tuple[str, str], ...]]":
        _require_open(session)
        named = dict(metadata_in(call.start.metadata)).get(RUNNER_KEY, "")
        name = require_name(str(named), RUNNER_KEY)
        request = registry_service_pb2.GetResourceRequest(kind=ResourceKind.RUNNER.value, name=name)
        found = await self._registry.GetResource(request, timeout=CALL_TIMEOUT_SECONDS)
        runner = runner_pb2.Runner()
        found.resource.content.Unpack(runner)
        channel = await self._channels.get(runner.address)
        stub = cast("RunnerServiceAsyncStub", runner_service_pb2_grpc.RunnerServiceStub(channel))
        return stub, metadata_of(runner.address)


def _require_open(session: LinkSession) -> None:
    if not session.session_id:
        raise WeftError(Reason.PERMISSION_DENIED, "no session is open over this link")
