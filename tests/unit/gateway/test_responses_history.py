"""Any stored response can be continued."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from response_script import MemoryResponses

from gateway.gateway_config import MediaConfig, RequestLimits
from gateway.intake.json_guard import parse
from gateway.media import RequestMedia
from gateway.responses.document import ResponseDocument
from gateway.responses.history import conversation_of, exchange_of, items_to_store
from gateway.responses.output import input_item_id, new_response_id, output_item_id, response_of
from gateway.responses.payload import own_items, to_response_request
from gateway.responses.response_stream import ResponsesAnswer
from gateway.responses.schema import ResponsesRequest
from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2
from weft.api.router.v1 import stored_response_service_pb2
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.timestamps import stamp_of
from weft_testing.fake_clock import FakeClock

TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
CALL = st.builds(
    event_pb2.ToolCallDelta,
    index=st.integers(0, 2),
    id=st.sampled_from(["", "call_a", "x" * 300]),
    name=st.sampled_from(["", "weather", "w" * 300]),
    arguments_text=TEXTS,
)
DELTA = st.builds(
    event_pb2.Delta, text=TEXTS, reasoning=TEXTS, refusal=st.just("") | TEXTS, tool_calls=st.lists(CALL, max_size=2)
)


def store_of(*responses: stored_response_service_pb2.StoredResponse) -> MemoryResponses:
    return MemoryResponses({response.id: response for response in responses})


def request_of(**fields: object) -> ResponsesRequest:
    return parse(ResponsesRequest, json.dumps({"model": "m", "input": "hi", **fields}).encode(), max_depth=64)


def stored_response(
    request: ResponsesRequest, *deltas: event_pb2.Delta, finish: str = "STOP"
) -> stored_response_service_pb2.StoredResponse:
    """The stored response to `request` from these deltas."""
    response_id = new_response_id()
    document = ResponseDocument(request, response_id, clock=FakeClock(), arrived=0.0, is_stored=True)
    answer = ResponsesAnswer(document)
    last = event_pb2.Delta(finish_reason=event_pb2.FinishReason.Value(f"FINISH_REASON_{finish}"))
    answer.add([event_pb2.InferenceEvent(delta=delta) for delta in (*deltas, last)])
    return stored_response_service_pb2.StoredResponse(
        id=response_id,
        tenant="acme",
        previous_id="",
        create_time=stamp_of(datetime(2026, 1, 1, tzinfo=UTC)),
        body=answer.conclude(receipt_pb2.Receipt()),
        items=items_to_store(own_items(request), response_id),
    )


async def continued(store: MemoryResponses | None, tenant: str = "acme", **fields: Any) -> chat_pb2.ChatPayload:
    request = request_of(**fields)
    conversation = await conversation_of(store, tenant, own_items(request), request.previous_response_id)
    return to_response_request(request, conversation, RequestMedia(MediaConfig()), RequestLimits()).payload


@given(deltas=st.lists(DELTA, max_size=6), finish=st.sampled_from(["STOP", "LENGTH", "TOOL_CALLS"]))
async def test_every_answer_can_be_continued(deltas: list[event_pb2.Delta], finish: str) -> None:
    before = stored_response(request_of(), *deltas, finish=finish)
    payload = await continued(store_of(before), previous_response_id=before.id, input="Go on")
    said = "".join(part.text for message in payload.messages[1:-1] for part in message.content)
    assert said == "".join(delta.text for delta in deltas)
    assert [part.text for message in (payload.messages[0], payload.messages[-1]) for part in message.content] == [
        "hi",
        "Go on",
    ]


async def test_pool_envelope_answer_can_be_continued_and_referenced() -> None:
    before = stored_response(request_of(envelope="pool"), event_pb2.Delta(reasoning="Hm.", text="Wait."))
    assert [item["type"] for item in json.loads(before.body)["output"]] == ["reasoning", "output_text"]
    payload = await continued(store_of(before), previous_response_id=before.id, input="Go on")
    turns = [(message.role, message.content[0].text) for message in payload.messages]
    assert turns == [(chat_pb2.ROLE_USER, "hi"), (chat_pb2.ROLE_ASSISTANT, "Wait."), (chat_pb2.ROLE_USER, "Go on")]
    reference = {"type": "item_reference", "id": json.loads(before.body)["output"][1]["id"]}
    named = await continued(store_of(before), input=[reference, {"role": "user", "content": "More"}])
    assert named.messages[0].content[0].text == "Wait."


async def test_every_output_item_can_be_referenced() -> None:
    call = event_pb2.ToolCallDelta(index=0, id="call_a", name="weather", arguments_text="{}")
    delta = event_pb2.Delta(reasoning="Hm.", text="Wait.", tool_calls=[call])
    before = stored_response(request_of(), delta, finish="TOOL_CALLS")
    ids = [item.id for item in exchange_of(before)]
    result = {"type": "function_call_output", "call_id": "call_a", "output": "sunny"}
    references = [{"type": "item_reference", "id": item_id} for item_id in ids]
    payload = await continued(store_of(before), input=[*references, result])
    assert [message.role for message in payload.messages] == [
        chat_pb2.ROLE_USER,
        chat_pb2.ROLE_ASSISTANT,
        chat_pb2.ROLE_TOOL,
    ]
    turn = payload.messages[1]
    assert (turn.reasoning, turn.content[0].text, turn.tool_calls[0].name) == ("Hm.", "Wait.", "weather")


@pytest.mark.parametrize("tenant", ["acme", "other"])
async def test_unknown_reference_in_the_last_turn_is_refused_with_its_position(tenant: str) -> None:
    before = stored_response(request_of(), event_pb2.Delta(text="Hi"))
    item_id = output_item_id(before.id, "message", 7 if tenant == "acme" else 0)
    reference = {"type": "item_reference", "id": item_id}
    for store in (store_of(before), None):
        with pytest.raises(FieldError) as caught:
            await continued(store, tenant, input=[{"role": "user", "content": "hi"}, reference])
        assert caught.value.field == "input[1].id"


@pytest.mark.parametrize("item_id", ["msg_1", "rs_68af", "fc_", output_item_id("resp_" + "0" * 24, "message", 1)])
@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize(
    "last", [{"role": "user", "content": "Go on"}, {"type": "function_call_output", "call_id": "c", "output": "Go on"}]
)
async def test_session_continues_if_referenced_items_are_not_stored(
    item_id: str, is_stored: bool, last: dict[str, Any]
) -> None:
    store = store_of(stored_response(request_of(), event_pb2.Delta(text="Hi"))) if is_stored else None
    lost = {"type": "item_reference", "id": item_id}
    payload = await continued(store, input=[{"role": "user", "content": "hi"}, lost, last])
    texts = [part.text for message in payload.messages for part in message.content]
    assert (texts[0], texts[1], texts[-1]) == ("hi", "[an earlier item is missing: it is not stored]", "Go on")


async def test_response_of_another_tenant_is_not_found() -> None:
    before = stored_response(request_of(), event_pb2.Delta(text="Hi"))
    with pytest.raises(WeftError) as caught:
        await continued(store_of(before), "other", previous_response_id=before.id)
    assert caught.value.reason is Reason.NOT_FOUND
    assert caught.value.metadata["field"] == "previous_response_id"


def test_items_are_stored_with_type_id_and_content_list() -> None:
    request = request_of(
        input=[
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two", "id": "msg_mine"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        ]
    )
    response_id = new_response_id()
    first, second, call, result = json.loads(items_to_store(own_items(request), response_id))
    assert first == {
        "id": input_item_id(response_id, "message", 0),
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "one"}],
    }
    assert (second["id"], second["content"]) == ("msg_mine", [{"type": "output_text", "text": "two"}])
    assert (call["type"], result["output"]) == ("function_call", "sunny")


@pytest.mark.parametrize("make", [output_item_id, input_item_id])
@pytest.mark.parametrize("kind", ["message", "reasoning", "function_call", "function_call_output", "item_reference"])
def test_item_id_identifies_its_response(make: Any, kind: str) -> None:
    response_id = new_response_id()
    assert response_of(make(response_id, kind, 12)) == response_id


@pytest.mark.parametrize("item_id", ["", "msg_1", "msg_" + "g" * 24 + "_0", "resp_" + "0" * 24, "a/b"])
def test_item_id_of_another_tenant_reveals_nothing(item_id: str) -> None:
    assert response_of(item_id) is None
