"""Earlier turns that a model cannot handle become text, so that no conversation fails with every further turn."""

import json

import pytest

from weft.api.common.v1 import chat_pb2
from weft.dispatch.history import earlier_turns, object_arguments, with_notes
from weft.dispatch.payload_description import TOKENS_PER_MEDIUM, describe, needed_skills
from weft.kernel.requests.request_values import Skill

USER, MODEL, TOOL, SYSTEM = chat_pb2.ROLE_USER, chat_pb2.ROLE_ASSISTANT, chat_pb2.ROLE_TOOL, chat_pb2.ROLE_SYSTEM
IMAGE = chat_pb2.ContentPart(image=chat_pb2.MediaPart(data=b"x", media_type="image/png"))


def said(role: chat_pb2.Role.ValueType, *parts: str | chat_pb2.ContentPart) -> chat_pb2.ChatMessage:
    content = [chat_pb2.ContentPart(text=part) if isinstance(part, str) else part for part in parts]
    return chat_pb2.ChatMessage(role=role, content=content)


def chat(*messages: chat_pb2.ChatMessage) -> chat_pb2.ChatPayload:
    return chat_pb2.ChatPayload(messages=messages)


def texts(payload: chat_pb2.ChatPayload) -> list[tuple[chat_pb2.Role.ValueType, str]]:
    return [(message.role, "|".join(part.text for part in message.content)) for message in payload.messages]


@pytest.mark.parametrize(
    "text",
    [
        '{"q": "unfinis',
        '{"q": "he said "hi""}',
        "{q: 1}",
        "[1]",
        "3",
        '"words"',
        '{"q": NaN}',
        '{"q": 1e999}',
        '{"q": 1} {"q": 2}',
        '{"q": "\\ud83d"}',
        '{"q": "line\nbreak"}',
        "{" * 5_000,
        '{"a":' * 5_000,
    ],
)
def test_truncated_or_badly_quoted_arguments_do_not_fail_the_conversation(text: str) -> None:
    assert json.loads(object_arguments(text)) == {"arguments": text}


@pytest.mark.parametrize("text", ["", " ", "null", "{}"])
def test_empty_arguments_become_an_empty_object(text: str) -> None:
    assert object_arguments(text) == "{}"


def test_object_arguments_reach_the_engine_unchanged() -> None:
    assert object_arguments('{ "a" : 1, "b": "x" }') == '{ "a" : 1, "b": "x" }'
    assert object_arguments(json.dumps('{"a": 1}')) == '{"a": 1}'


@pytest.mark.parametrize(
    ("roles", "earlier"),
    [
        ([USER], [False]),
        ([SYSTEM, USER, MODEL, USER], [True, True, True, False]),
        ([USER, MODEL, USER, USER], [True, True, False, False]),
        ([USER, MODEL, TOOL], [True, True, True]),
        ([USER, MODEL, TOOL, USER], [True, True, True, True]),
        ([USER, MODEL, USER, MODEL], [True, True, False, True]),
        ([MODEL], [True]),
        ([], []),
    ],
)
def test_last_turn_ends_at_the_assistant_and_tool_results_are_history(
    roles: list[chat_pb2.Role.ValueType], earlier: list[bool]
) -> None:
    assert earlier_turns(roles) == earlier


def test_image_of_an_earlier_turn_does_not_fail_on_a_text_model() -> None:
    payload = chat(said(USER, "look", IMAGE), said(MODEL, "a cat"), said(USER, "and now?"))
    fitted, warnings = with_notes(payload, frozenset({Skill.IMAGE}))
    assert needed_skills(payload) == frozenset()
    assert texts(fitted)[0] == (USER, "look|[image left out: this model cannot read it]")
    assert [warning.field for warning in warnings] == ["messages[0].content[1]"]
    assert payload.messages[0].content[1].HasField("image"), "another attempt may reach a model that takes it"


def test_image_of_the_last_turn_needs_a_vision_model() -> None:
    payload = chat(said(USER, "hi"), said(MODEL, "hello"), said(USER, "look", IMAGE))
    assert needed_skills(payload) == {Skill.IMAGE}
    assert with_notes(payload, frozenset({Skill.IMAGE})) == (payload, [])


def test_pool_prefers_models_that_accept_images_of_earlier_turns() -> None:
    payload = chat(said(USER, IMAGE), said(MODEL, "a cat"), said(USER, "and now?"))
    seeing = describe(payload, salt="")
    blind = describe(payload, salt="", unread=lambda: frozenset({Skill.IMAGE}))
    assert seeing.skills == {Skill.IMAGE}
    assert not blind.skills
    assert seeing.prompt_tokens - blind.prompt_tokens == TOKENS_PER_MEDIUM
