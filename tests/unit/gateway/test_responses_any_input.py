"""Any request is translated, or refused with the name of a field."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.gateway_config import MediaConfig, RequestLimits
from gateway.intake.json_guard import parse
from gateway.media import RequestMedia
from gateway.openai.chat_builder import ChatTranslation
from gateway.responses.document import ResponseDocument
from gateway.responses.history import conversation_of, items_to_store
from gateway.responses.output import new_response_id
from gateway.responses.payload import own_items, to_response_request
from gateway.responses.response_stream import ResponsesAnswer
from gateway.responses.schema import ResponsesRequest
from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

CALLERS_FAULTS = {Reason.INVALID_ARGUMENT, Reason.MALFORMED_REQUEST, Reason.REQUEST_TOO_LARGE, Reason.NOT_FOUND}
SCALARS = st.none() | st.booleans() | st.integers(-2, 30) | st.floats(-1, 3) | st.text(max_size=4)
TYPES = st.sampled_from(
    [
        "message", "function_call", "function_call_output", "reasoning", "item_reference", "text", "image_url",
        "input_text", "output_text", "input_image", "input_audio", "input_file", "refusal", "function", "web_search",
        "allowed_tools", "json_schema", "json_object", "reasoning_text", "summary_text", "other",
    ]
)  # fmt: skip
NAMES = st.sampled_from(
    [
        "role", "content", "id", "call_id", "name", "arguments", "output", "summary", "text", "image_url", "detail",
        "status", "url", "refusal", "input_audio", "data", "format", "schema", "mode", "tools", "parameters", "strict",
        "effort", "verbosity", "encrypted_content", "top_k", "stop", "file_id",
    ]
)  # fmt: skip
LIKELY = SCALARS | st.sampled_from(["user", "assistant", "system", "c1", "f", "auto", "low", "data:,x", "completed"])
VALUES = st.recursive(
    LIKELY,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.builds(
            lambda kind, fields: fields if kind is None else {"type": kind, **fields},
            st.none() | TYPES,
            st.dictionaries(NAMES, inner, max_size=4),
        )
    ),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        "input", "messages", "instructions", "tools", "tool_choice", "text", "reasoning", "include", "metadata",
        "decoding", "store", "stream", "stream_options", "top_logprobs", "truncation", "thinking", "conversation",
        "previous_response_id", "source_lang_code", "target_lang_code", "chat_template_kwargs", "max_output_tokens",
        "temperature", "parallel_tool_calls", "prompt_cache_key", "user", "unheard_of", "x_unheard",
    ]
)  # fmt: skip


async def understood(fields: dict[str, Any]) -> tuple[ResponsesRequest, ChatTranslation] | WeftError:
    try:
        request = parse(ResponsesRequest, json.dumps(fields).encode(), max_depth=64)
        conversation = await conversation_of(None, "acme", own_items(request), request.previous_response_id)
        return request, to_response_request(request, conversation, RequestMedia(MediaConfig()), RequestLimits())
    except WeftError as error:
        return error


@given(given_fields=st.dictionaries(FIELDS, VALUES, max_size=5), has_input=st.booleans())
async def test_any_request_is_answered_or_refused_with_a_weft_error(
    given_fields: dict[str, Any], has_input: bool
) -> None:
    found = await understood({"model": "m", **given_fields, **({"input": "hi"} if has_input else {})})
    if isinstance(found, WeftError):
        assert found.reason in CALLERS_FAULTS
        assert found.reason is Reason.MALFORMED_REQUEST or found.metadata["field"]
        return
    request, asked = found
    assert asked.payload.messages
    response_id = new_response_id()
    assert len(json.loads(items_to_store(own_items(request), response_id))) == len(own_items(request))
    document = ResponseDocument(request, response_id, clock=FakeClock(), arrived=0.0, is_stored=False)
    answer = ResponsesAnswer(document)
    stop = event_pb2.Delta(text="Hi", finish_reason=event_pb2.FINISH_REASON_STOP)
    answer.add([event_pb2.InferenceEvent(delta=stop)])
    assert json.loads(answer.conclude(receipt_pb2.Receipt()))["status"] == "completed"
