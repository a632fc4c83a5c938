"""gRPC calls to a server that asks for keys: who is let in, to what, and who a servicer is told that they are."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kit.keys import KEY as KEY_ID
from kit.keys import SECRET, ring, ring_of, verifier

from weft.api.registry.v1 import registry_service_pb2 as registry_pb
from weft.api.registry.v1 import registry_service_pb2_grpc as registry_grpc
from weft.api.router.v1 import inference_service_pb2 as pb
from weft.api.router.v1 import inference_service_pb2_grpc
from weft.kernel.access.principal import KeyRing, key_text
from weft.kernel.access.rpc_auth import AuthInterceptor, caller
from weft.kernel.channels.rpc import error_from_call, new_server, open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import Health
from weft_testing.fake_clock import FakeClock

if TYPE_CHECKING:
    from weft.api.registry.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub
    from weft.api.router.v1.inference_service_pb2_grpc import InferenceServiceAsyncStub

KEY = key_text(KEY_ID, SECRET)
OTHER_ID = "otherotherot"
OTHER = key_text(OTHER_ID, SECRET)


class WhoCalls(inference_service_pb2_grpc.InferenceServiceServicer):
    """Answers with who calls; streams and unary calls alike."""

    def __init__(self) -> None:
        self.calls = 0

    async def Chat(self, request: pb.ChatRequest, context: Any) -> AsyncGenerator[pb.ChatResponse]:  # noqa: N802
        self.calls += 1
        for _ in range(2):
            response = pb.ChatResponse()
            response.events.add().started.runner = caller().name
            yield response

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:  # noqa: N802
        self.calls += 1
        response = pb.EmbedResponse()
        response.receipt.host = f"{caller().name} {caller().tenant}"
        return response

    Complete = Rerank = Tokenize = GenerateImages = Transcribe = Speak = None  # type: ignore[assignment]
    StreamImages = StreamTranscription = None  # type: ignore[assignment]


class Registry(registry_grpc.RegistryServiceServicer):
    """Its Watch writes, as the real one's does: a coroutine and no generator."""

    async def Watch(self, request: registry_pb.WatchRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await context.write(registry_pb.WatchResponse(revision=7))


@asynccontextmanager
async def serving(keys: KeyRing, address: str = "127.0.0.1:0") -> AsyncIterator[tuple[str, WhoCalls]]:
    server = new_server([AuthInterceptor(lambda: keys, FakeClock())])
    who = WhoCalls()
    handlers: dict[str, Any] = {
        "Chat": grpc.unary_stream_rpc_method_handler(
            who.Chat, pb.ChatRequest.FromString, pb.ChatResponse.SerializeToString
        ),
        "Embed": grpc.unary_unary_rpc_method_handler(
            who.Embed, pb.EmbedRequest.FromString, pb.EmbedResponse.SerializeToString
        ),
    }
    watch = {
        "Watch": grpc.unary_stream_rpc_method_handler(
            Registry().Watch,  # type: ignore[abstract]
            registry_pb.WatchRequest.FromString,
            registry_pb.WatchResponse.SerializeToString,
        )
    }
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler("weft.api.router.v1.InferenceService", handlers),
            grpc.method_handlers_generic_handler("weft.api.registry.v1.RegistryService", watch),
        )
    )
    health = Health()
    health.register(server, [])
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield (address if address.startswith("unix:") else f"127.0.0.1:{port}"), who
    finally:
        await server.stop(None)


def inference(channel: grpc.aio.Channel) -> "InferenceServiceAsyncStub":
    return cast("InferenceServiceAsyncStub", inference_service_pb2_grpc.InferenceServiceStub(channel))


async def embed(address: str, metadata: Iterable[tuple[str, str]] = ()) -> str:
    async with open_channel(address) as channel:
        stub = inference(channel)
        try:
            answer = await stub.Embed(pb.EmbedRequest(model="m"), metadata=tuple(metadata), timeout=5)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
    return str(answer.receipt.host)


@pytest.mark.parametrize("header", [("authorization", f"Bearer {KEY}"), ("x-api-key", KEY)])
async def test_servicer_sees_the_key_of_unary_calls_and_streams(header: tuple[str, str]) -> None:
    async with serving(ring_of(verifier())) as (address, _), open_channel(address) as channel:
        assert await embed(address, [header]) == f"key:{KEY_ID} ann"
        stub = inference(channel)
        call = stub.Chat(pb.ChatRequest(model="m"), metadata=(header,), timeout=5)
        told = [frame.events[0].started.runner async for frame in call]
        assert told == [f"key:{KEY_ID}"] * 2


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", "Bearer wrong")],
        [("authorization", f"Basic {KEY}")],
        [("authorization", "Bearer wrong"), ("x-api-key", KEY)],
        [("x-api-key", f"weft_{KEY_ID}_{'6' * 64}")],
        [("authorization", "Bearer wrong"), ("authorization", f"Bearer {KEY}")],
        [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")],
        [("x-api-key", "wrong"), ("x-api-key", KEY)],
    ],
)
async def test_unauthenticated_call_is_rejected_before_the_servicer(metadata: list[tuple[str, str]]) -> None:
    async with serving(ring_of(verifier())) as (address, who):
        with pytest.raises(WeftError) as found:
            await embed(address, metadata)
        assert found.value.reason is Reason.UNAUTHENTICATED
        async with open_channel(address) as channel:
            stub = inference(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in stub.Chat(pb.ChatRequest(model="m"), metadata=tuple(metadata), timeout=5):
                    pass
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert who.calls == 0


@pytest.mark.parametrize("first", [KEY, OTHER])
async def test_keys_of_two_tenants_in_one_call_are_rejected(first: str) -> None:
    second = OTHER if first == KEY else KEY
    async with serving(ring_of(verifier(), verifier(OTHER_ID, tenant="bob"))) as (address, who):
        assert await embed(address, [("x-api-key", OTHER)]) == f"key:{OTHER_ID} bob"
        with pytest.raises(WeftError, match="two different API keys") as found:
            await embed(address, [("authorization", f"Bearer {first}"), ("x-api-key", second)])
        assert (found.value.reason, who.calls) == (Reason.UNAUTHENTICATED, 1)


async def test_same_key_in_both_headers_is_accepted() -> None:
    async with serving(ring_of(verifier())) as (address, _):
        assert await embed(address, [("authorization", f"Bearer {KEY}"), ("x-api-key", KEY)]) == f"key:{KEY_ID} ann"


async def test_key_without_the_scope_is_denied_by_name_and_service_calls_need_the_service_scope() -> None:
    async with serving(ring({KEY_ID: ["models:view"]})) as (address, who), open_channel(address) as channel:
        with pytest.raises(WeftError) as found:
            await embed(address, [("x-api-key", KEY)])
        assert found.value.reason is Reason.PERMISSION_DENIED
        assert "inference:create" in found.value.message
        assert who.calls == 0
        stub = cast("RegistryServiceAsyncStub", registry_grpc.RegistryServiceStub(channel))
        watch = stub.Watch(registry_pb.WatchRequest(), metadata=(("x-api-key", KEY),), timeout=5)
        assert [response.revision async for response in watch] == [7]


async def test_socket_caller_is_local_unless_a_key_is_sent(
    tmp_path: Path,
) -> None:
    async with serving(ring_of(verifier()), f"unix:{tmp_path}/s") as (address, _):
        assert await embed(address) == "local default"
        assert await embed(address, [("x-api-key", KEY)]) == f"key:{KEY_ID} ann"


async def test_health_is_open_and_reflection_requires_a_key() -> None:
    async with serving(ring_of(verifier())) as (address, _), open_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "liveness"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, name
        asks = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=bytes,
            response_deserializer=bytes,
        )
        call = asks(timeout=5)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
