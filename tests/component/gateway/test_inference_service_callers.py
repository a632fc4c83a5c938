"""Callers' priority class, client and session over gRPC."""

from pathlib import Path
from typing import Any

import pytest
from gateway_script import ScriptedDispatcher, hello
from inference_stage import PROMPT, conversation, embedding, inference, outcome, refused, stub_of

from weft.api.common.v1 import completion_pb2, priority_pb2
from weft.api.router.v1 import inference_service_pb2 as pb
from weft.kernel.access.principal import LOCAL, OTHER_USER
from weft.kernel.access.rpc_auth import as_caller
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Handling, Priority


async def ask_all(channel: Any, options: pb.RequestOptions, model: str = "tiny") -> None:
    """Each of the three calls, to its end."""
    stub, text = stub_of(channel), completion_pb2.CompletionPayload(prompts=[PROMPT])
    await outcome(stub.Chat(pb.ChatRequest(model=model, payload=conversation(), options=options)))
    await outcome(stub.Complete(pb.CompleteRequest(model=model, payload=text, options=options)))
    await outcome(stub.Embed(pb.EmbedRequest(model=model, payload=embedding(), options=options)))


async def test_call_with_two_tenants_is_rejected_and_a_repeated_tenant_accepted(tmp_path: Path) -> None:
    request = pb.EmbedRequest(model="tiny", payload=embedding())
    dispatcher = ScriptedDispatcher(hello(), vectors=[[0.5]])
    async with inference(tmp_path, dispatcher) as channel:
        embed = stub_of(channel).Embed
        await embed(request, metadata=(("x-tenant-id", "ann"), ("x-tenant-id", "ann")))
        refusal = await refused(embed(request, metadata=(("x-tenant-id", "ann"), ("x-tenant-id", "bob"))))
    assert refusal.reason is Reason.MALFORMED_REQUEST
    assert [context.tenant for context in dispatcher.contexts] == ["ann"]


async def test_every_call_passes_caller_and_priority(tmp_path: Path) -> None:
    dispatcher = ScriptedDispatcher(hello(), vectors=[[0.5]])
    options = pb.RequestOptions(priority=priority_pb2.PRIORITY_LOW, client_id="nightly", session="thread 7")
    async with inference(tmp_path, dispatcher) as channel:
        await ask_all(channel, options, model="route/drafts")
    assert [(one.priority, one.names_priority) for one in dispatcher.contexts] == [(Priority.LOW, True)] * 3
    assert [(one.client_id, one.session) for one in dispatcher.contexts] == [("nightly", "thread 7")] * 3
    assert {one.model for one in dispatcher.contexts} == {"route/drafts"}


async def test_default_priority_comes_from_the_client_profile(tmp_path: Path) -> None:
    dispatcher = ScriptedDispatcher(hello(), vectors=[[0.5]])
    async with inference(tmp_path, dispatcher) as channel:
        await ask_all(channel, pb.RequestOptions())
    assert [(one.priority, one.names_priority) for one in dispatcher.contexts] == [(Priority.NORMAL, False)] * 3


async def test_keep_alive_of_a_key_that_may_not_unload_is_ignored(tmp_path: Path) -> None:
    options = pb.RequestOptions()
    options.keep_alive.seconds = 0
    for holder, handling in (
        (LOCAL, Handling(keep_alive_seconds=0.0)),
        (OTHER_USER, Handling(keep_alive_ignored=True)),
    ):
        dispatcher = ScriptedDispatcher(hello(), vectors=[[0.5]])
        with as_caller(holder):
            async with inference(tmp_path, dispatcher) as channel:
                await ask_all(channel, options)
        assert [one.handling for one in dispatcher.contexts] == [handling] * 3


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
    async with inference(tmp_path, dispatcher) as channel:
        with pytest.raises(FieldError) as refusal:
            await ask_all(channel, options)
    assert refusal.value.field == field
    assert dispatcher.contexts == []


async def test_router_rejection_keeps_its_metadata_and_retry_delay(tmp_path: Path) -> None:
    metadata = {"tenant": "a", "limit": "100", "remaining": "0", "resetAt": "1745880060"}
    refusal = WeftError(Reason.RATE_LIMIT_EXCEEDED, "too much", metadata=metadata, retry_after_seconds=29.5)
    async with inference(tmp_path, ScriptedDispatcher([refusal])) as channel:
        with pytest.raises(WeftError) as told:
            await ask_all(channel, pb.RequestOptions())
    assert (told.value.reason, told.value.metadata) == (Reason.RATE_LIMIT_EXCEEDED, metadata)
    assert told.value.retry_after_seconds == 29.5
