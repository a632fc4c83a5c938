"""The text of prompts and answers that is captured, and of which requests."""

from dataclasses import replace

import pytest

from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2, event_pb2
from weft.api.registry.v1.tenant_pb2 import Tenant, TenantManifest
from weft.dispatch.captured import MAX_TEXT_BYTES, CapturedRequest, may_capture
from weft.dispatch.fleet import FleetView
from weft.dispatch.request_receipt import RequestContext
from weft.kernel.requests.request_values import CacheMode, Handling, Operation
from weft.kernel.telemetry.structured_logs import new_traceparent
from weft.kernel.text.json_objects import to_json_object

CONTEXT = RequestContext(
    request_id="r1", tenant="acme", model="m", operation=Operation.CHAT, traceparent=new_traceparent()
)
VIEW = FleetView(
    revision=1,
    tenants={name: Tenant(manifest=TenantManifest(name=name, capture=name == "acme")) for name in ("acme", "other")},
)
CHAT = chat_pb2.ChatPayload(
    messages=[
        chat_pb2.ChatMessage(role=chat_pb2.ROLE_SYSTEM, content=[chat_pb2.ContentPart(text="Be brief.")]),
        chat_pb2.ChatMessage(
            role=chat_pb2.ROLE_USER,
            content=[
                chat_pb2.ContentPart(text="What is this? "),
                chat_pb2.ContentPart(image=chat_pb2.MediaPart(data=b"x" * 2048, media_type="image/png")),
            ],
        ),
        chat_pb2.ChatMessage(
            role=chat_pb2.ROLE_ASSISTANT, tool_calls=[chat_pb2.ToolCallRecord(name="look", arguments_text='{"at": 1}')]
        ),
    ]
)


def _delta(**fields: object) -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(delta=event_pb2.Delta(**fields))  # type: ignore[arg-type]


def test_prompt_has_its_roles_and_media_as_type_and_size() -> None:
    assert CapturedRequest(CONTEXT, CHAT).message().prompt == (
        "[system]\nBe brief.\n\n[user]\nWhat is this? (image/png, 2 KiB)\n\n[assistant]\n\n\n"
        '[tool call look]\n{"at": 1}'
    )
    completion = completion_pb2.CompletionPayload(
        prompts=[
            completion_pb2.PromptInput(text="Once"),
            completion_pb2.PromptInput(tokens=completion_pb2.TokenIds(ids=[1, 2])),
        ]
    )
    assert CapturedRequest(CONTEXT, completion).message().prompt == "[prompt]\nOnce\n\n[prompt]\n(2 token ids)"


def test_plain_answer_is_the_text_that_was_sent() -> None:
    captured = CapturedRequest(CONTEXT, CHAT)
    captured.add([event_pb2.InferenceEvent(started=event_pb2.Started(runner="a")), _delta(text="It is\n")])
    captured.add([_delta(text="a cat.")])
    assert captured.message().answer == "It is\na cat."


def test_other_parts_of_an_answer_have_their_kind() -> None:
    captured = CapturedRequest(CONTEXT, CHAT)
    call = event_pb2.ToolCall(id="c1", name="look", arguments=to_json_object({"at": 1}, "arguments"))
    captured.add([_delta(reasoning="Hm"), _delta(reasoning="m"), event_pb2.InferenceEvent(tool_call=call)])
    captured.add([event_pb2.InferenceEvent(tool_result=event_pb2.ToolResult(id="c1", content="a cat"))])
    captured.add([_delta(text="A cat."), _delta(index=1, text="Cat.")])
    piece = event_pb2.ToolCallDelta(name="say", arguments_text="{")
    captured.add([_delta(tool_calls=[piece]), _delta(tool_calls=[event_pb2.ToolCallDelta(arguments_text="}")])])
    assert captured.message().answer == (
        '[reasoning]\nHmm\n\n[tool call c1]\nlook {"at": 1}\n\n[tool result c1]\na cat\n\n'
        "[answer]\nA cat.\n\n[answer 2]\nCat.\n\n[tool call 1]\nsay {}"
    )


def test_text_beyond_the_bound_is_cut_off_and_marked() -> None:
    captured = CapturedRequest(CONTEXT, CHAT)
    captured.add([_delta(text="a" * (MAX_TEXT_BYTES - 1)), _delta(text="é")])
    captured.add([_delta(text="later")])
    found = captured.message()
    assert (len(found.answer.encode()), found.answer_cut, found.prompt_cut) == (MAX_TEXT_BYTES - 1, True, False)
    exact = CapturedRequest(CONTEXT, CHAT)
    exact.add([_delta(text="a" * MAX_TEXT_BYTES)])
    assert not exact.message().answer_cut


@pytest.mark.parametrize(
    ("context", "view"),
    [
        pytest.param(replace(CONTEXT, tenant="other"), VIEW, id="the tenant has no capture"),
        pytest.param(replace(CONTEXT, tenant="unknown"), VIEW, id="the tenant is not declared"),
        pytest.param(CONTEXT, FleetView(revision=1), id="no tenant is declared"),
        pytest.param(replace(CONTEXT, handling=Handling(cache_mode=CacheMode.NONE)), VIEW, id="X-Cache-Mode: none"),
    ],
)
def test_request_is_captured_only_for_a_tenant_with_capture_and_unless_marked(
    context: RequestContext, view: FleetView
) -> None:
    assert may_capture(VIEW, CONTEXT, CHAT)
    assert not may_capture(view, context, CHAT)


def test_requests_without_a_text_answer_are_not_captured() -> None:
    assert not may_capture(VIEW, CONTEXT, embedding_pb2.EmbeddingPayload())
