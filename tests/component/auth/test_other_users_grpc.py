"""A gRPC server without keys: other users of the machine infer and read, and change nothing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from typing_extensions import override

from weft.api.registry.v1 import key_service_pb2 as key_pb
from weft.api.router.v1 import inference_service_pb2 as pb
from weft.kernel.access import rpc_auth
from weft.kernel.access.rpc_auth import caller
from weft.kernel.channels.rpc import error_from_call, open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import Service
from weft_app.compose.grpc_host import GrpcHost

KEYS, INFERENCE = "weft.api.registry.v1.KeyService", "weft.api.router.v1.InferenceService"


class WhoCalls(Service):
    """Answers with who calls."""

    @override
    def register(self, server: grpc.aio.Server) -> None:
        async def embed(_request: Any, _context: Any) -> pb.EmbedResponse:
            response = pb.EmbedResponse()
            response.receipt.host = caller().name
            return response

        async def create(_request: Any, _context: Any) -> key_pb.CreateKeyResponse:
            return key_pb.CreateKeyResponse(text=caller().name)

        handlers: dict[str, tuple[str, Any, Any, Any]] = {
            INFERENCE: ("Embed", embed, pb.EmbedRequest, pb.EmbedResponse),
            KEYS: ("CreateKey", create, key_pb.CreateKeyRequest, key_pb.CreateKeyResponse),
        }
        for service, (name, handler, request, response) in handlers.items():
            method = grpc.unary_unary_rpc_method_handler(handler, request.FromString, response.SerializeToString)
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))

    @override
    async def start(self) -> None:
        """Does nothing."""

    @override
    async def stop(self, grace_seconds: float) -> None:
        """Does nothing."""


@asynccontextmanager
async def _called(address: str) -> AsyncIterator[grpc.aio.Channel]:
    host = GrpcHost()
    bound = host.bind(address)
    await host.start([WhoCalls()])
    try:
        async with open_channel(bound) as channel:
            yield channel
    finally:
        await host.stop(0.0)


async def _infer(channel: grpc.aio.Channel) -> str:
    call = channel.unary_unary(f"/{INFERENCE}/Embed", pb.EmbedRequest.SerializeToString, pb.EmbedResponse.FromString)
    return str((await call(pb.EmbedRequest())).receipt.host)


async def _create_key(channel: grpc.aio.Channel) -> str:
    call: Any = channel.unary_unary(
        f"/{KEYS}/CreateKey", key_pb.CreateKeyRequest.SerializeToString, key_pb.CreateKeyResponse.FromString
    )
    try:
        return str((await call(key_pb.CreateKeyRequest())).text)
    except grpc.aio.AioRpcError as error:
        raise error_from_call(error, peer_lost=Reason.INTERNAL) from error


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0", "localhost:0"])
async def test_user_that_runs_the_server_may_do_everything(address: str) -> None:
    async with _called(address) as channel:
        assert (await _infer(channel), await _create_key(channel)) == ("local", "local")


async def test_other_user_infers_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_auth, "is_own_user", lambda *_: False)
    async with _called("127.0.0.1:0") as channel:
        assert await _infer(channel) == "other-user"
        with pytest.raises(WeftError, match=r"weft keys create.*group weft") as refused:
            await _create_key(channel)
    assert refused.value.reason is Reason.PERMISSION_DENIED


async def test_socket_of_the_home_is_for_its_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rpc_auth, "is_own_user", lambda *_: False)
    async with _called(f"unix:{tmp_path / 'weft.sock'}") as channel:
        assert await _create_key(channel) == "local"
