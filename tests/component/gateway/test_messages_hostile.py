"""Requests that are almost those of a real client are translated or refused by name, without other effects."""

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from messages_script import claude_code_request

from gateway.anthropic.messages import to_payload
from gateway.anthropic.schema import MessagesRequest
from gateway.gateway_config import MediaConfig, RequestLimits
from gateway.intake.json_guard import parse
from gateway.media import RequestMedia
from gateway.openai.chat_builder import ChatTranslation
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

Place = tuple[str | int, ...]
MEDIA = MediaConfig(allowed_hosts=("images.example.org",))


def honest_request() -> dict[str, Any]:
    """A turn of Claude Code with every supported field."""
    request = claude_code_request()
    image = {"type": "image", "source": {"type": "url", "url": "https://images.example.org/a.png"}}
    request["messages"][0]["content"].append(image)
    request["output_config"]["format"] = {"type": "json_schema", "schema": {"type": "object"}}
    more = {"tool_choice": {"type": "any"}, "stop_sequences": ["END"], "temperature": 0.5, "top_p": 1, "top_k": 4}
    return request | more


def places(value: object, at: Place = ()) -> Iterator[Place]:
    if at:
        yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in inner:
        yield from places(member, (*at, key))


def translated(request: dict[str, Any]) -> ChatTranslation:
    asked = parse(MessagesRequest, json.dumps(request).encode(), max_depth=64)
    return to_payload(asked, RequestLimits(), RequestMedia(MEDIA))


HONEST = honest_request()
ODD: st.SearchStrategy[object] = st.sampled_from([
    None, True, 0, -1, 1.5, 10**40, 1e308, "", "\x00", "x" * 2_000, "text", [], {}, [[]], [{}], [1],
    {"type": "text"}, {"type": "text", "text": 3}, {"type": None}, {"type": ["text"]}, {"type": {}}, {"type": "what"},
    {"type": "image", "source": 7}, {"type": "image", "source": {"type": []}}, {"type": "thinking", "thinking": None},
    {"type": "tool_result", "tool_use_id": "toolu_1", "content": {}}, {"type": "tool_use", "id": "", "input": []},
])  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(list(places(HONEST))), st.none() | st.tuples(ODD)), min_size=1, max_size=3))
def test_fuzzed_request_is_rejected_by_name_or_parsed(
    changes: list[tuple[Place, tuple[object] | None]],
) -> None:
    request = copy.deepcopy(HONEST)
    for place, replacement in changes:
        change(request, place, replacement)
    told = outcome(request)
    if isinstance(told, WeftError):
        assert told.reason is Reason.MALFORMED_REQUEST or told.metadata["field"]
    else:
        assert told.payload.messages
        assert told.payload.SerializeToString()


def outcome(request: dict[str, Any]) -> ChatTranslation | WeftError:
    try:
        return translated(request)
    except WeftError as error:
        return error


def change(request: dict[str, Any], place: Place, replacement: tuple[object] | None) -> None:
    """Replace or remove the value at a path, which an earlier change may have removed."""
    target: Any = request
    try:
        for key in place[:-1]:
            target = target[key]
        if replacement is None:
            del target[place[-1]]
        else:
            target[place[-1]] = copy.deepcopy(replacement[0])
    except (KeyError, IndexError, TypeError):
        return


def test_valid_request_is_parsed() -> None:
    found = translated(honest_request())
    assert len(found.payload.messages) == 7
    unused = {warning.field.rpartition(".")[2] for warning in found.warnings}
    assert unused == {"eager_input_streaming"}
