"""Callers' priority class, client and session over gRPC."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateway_script import ScriptedDispatcher, hello

from router_svc.inference_servicer import InferenceServicer
from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2, priority_pb2
from weft.api.router.v1 import inference_service_pb2 as pb
from weft.api.router.v1 import inference_service_pb2_grpc
from weft.kernel.errors import FieldError, WeftError
from weft.kernel.json_schema import SchemaLimits
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority
from weft.kernel.rpc import error_from_call, new_server, open_channel


@asynccontextmanager
async def serving(folder: Path, dispatcher: ScriptedDispatcher) -> AsyncIterator[Any]:
    server = new_server()
    servicer = InferenceServicer(dispatcher, default_timeout_seconds=30, schemas=SchemaLimits())
    servicer.add_to_server(server)
    address = f"unix:{folder / 'router.sock'}"
    server.add_insecure_port(address)
    await server.start()
    channel = open_channel(address)
    try:
        yield inference_service_pb2_grpc.InferenceServiceStub(channel)
    finally:
        await channel.close(grace=None)
        await server.stop(grace=0.5)


async def ask_all(stub: Any, options: pb.RequestOptions, model: str = "tiny") -> None:
    """Each of the three calls, to its end. Raises the service's error, as a WeftError."""
    chat = chat_pb2.ChatPayload()
    chat.messages.add(role=chat_pb2.ROLE_USER).content.add(text="hi")
    prompts = [completion_pb2.PromptInput(text="hi")]
    text, inputs = completion_pb2.CompletionPayload(prompts=prompts), embedding_pb2.EmbeddingPayload(inputs=prompts)
    try:
        async for _ in stub.Chat(pb.ChatRequest(model=model, payload=chat, options=options)):
            pass
        async for _ in stub.Complete(pb.CompleteRequest(model=model, payload=text, options=options)):
            pass
        await stub.Embed(pb.EmbedRequest(model=model, payload=inputs, options=options))
    except grpc.aio.AioRpcError as error:
        raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error


async def test_call_with_two_tenants_is_rejected_and_a_repeated_tenant_accepted(tmp_path: Path) -> None:
    request = pb.EmbedRequest(model="tiny", payload=embedding_pb2.EmbeddingPayload())
    request.payload.inputs.add(text="hi")
    dispatcher = ScriptedDispatcher(hello(), vectors=[[0.5]])
    async with serving(tmp_path, dispatcher) as stub:
        await stub.Embed(request, metadata=(("x-tenant-id", "ann"), ("x-tenant-id", "ann")))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Embed(request, metadata=(("x-tenant-id", "ann"), ("x-tenant-id", "bob")))
    assert error_from_call(refused.value, Reason.SERVICE_UNAVAILABLE).reason is Reason.MALFORMED_REQUEST
    assert [context.tenant for context in dispatcher.contexts] == ["ann"]


async def test_every_call_passes_caller_and_priority(tmp_path: Path) -> None:
    dispatcher = ScriptedDispatcher(hello(), vectors=[[0.5]])
    options = pb.RequestOptions(priority=priority_pb2.PRIORITY_LOW, client_id="nightly", session="thread 7")
    async with serving(tmp_path, dispatcher) as stub:
        await ask_all(stub, options, model="route/drafts")
    assert [(one.priority, one.names_priority) for one in dispatcher.contexts] == [(Priority.LOW, True)] * 3
    assert [(one.client_id, one.session) for one in dispatcher.contexts] == [("nightly", "thread 7")] * 3
    assert {one.model for one in dispatcher.contexts} == {"route/drafts"}


async def test_default_priority_comes_from_the_client_profile(tmp_path: Path) -> None:
    dispatcher = ScriptedDispatcher(hello(), vectors=[[0.5]])
    async with serving(tmp_path, dispatcher) as stub:
        await ask_all(stub, pb.RequestOptions())
    assert [(one.priority, one.names_priority) for one in dispatcher.contexts] == [(Priority.NORMAL, False)] * 3


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (pb.RequestOptions(priority=priority_pb2.PRIORITY_SYSTEM), "options.priority"),
        (pb.RequestOptions(priority=priority_pb2.PRIORITY_DURABLE), "options.priority"),
        (pb.RequestOptions(priority=99), "options.priority"),  # type: ignore[arg-type]
        (pb.RequestOptions(client_id="two words"), "options.client_id"),
        (pb.RequestOptions(client_id="x" * 65), "options.client_id"),
        (pb.RequestOptions(session="x" * 257), "options.session"),
    ],
)
async def test_invalid_caller_field_is_rejected_by_name(tmp_path: Path, options: pb.RequestOptions, field: str) -> None:
    dispatcher = ScriptedDispatcher(hello())
    async with serving(tmp_path, dispatcher) as stub:
        with pytest.raises(FieldError) as refused:
            await ask_all(stub, options)
    assert refused.value.field == field
    assert dispatcher.contexts == []


async def test_router_rejection_keeps_its_metadata_and_retry_delay(tmp_path: Path) -> None:
    metadata = {"tenant": "a", "limit": "100", "remaining": "0", "resetAt": "1745880060"}
    refusal = WeftError(Reason.RATE_LIMIT_EXCEEDED, "too much", metadata=metadata, retry_after_seconds=29.5)
    async with serving(tmp_path, ScriptedDispatcher([refusal])) as stub:
        with pytest.raises(WeftError) as refused:
            await ask_all(stub, pb.RequestOptions())
    assert (refused.value.reason, refused.value.metadata) == (Reason.RATE_LIMIT_EXCEEDED, metadata)
    assert refused.value.retry_after_seconds == 29.5
