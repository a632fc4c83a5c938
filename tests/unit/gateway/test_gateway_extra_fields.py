"""Unknown fields are passed on, within limits; thinking has two spellings with one meaning."""

import json
from typing import Any

import pytest

from gateway.gateway_config import RequestLimits
from gateway.intake.json_guard import parse
from gateway.intake.request_model import NOT_USED
from gateway.openai import chat as chat_payload
from gateway.openai import completions as completion_payload
from gateway.openai import embeddings as embedding_payload
from gateway.openai.chat_schema import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.embeddings import EmbeddingRequest
from weft.api.common.v1 import chat_pb2, completion_pb2
from weft.api.runner.v1 import generation_service_pb2
from weft.dispatch.parameter_checks import MAX_EXTRA_BYTES, MAX_EXTRA_FIELDS
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.text.json_objects import plain_object

LIMITS = RequestLimits()
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "p"}


def chat_of(**fields: object) -> chat_pb2.ChatPayload:
    return _chat(json.dumps({**CHAT, **fields}))


def _chat(raw: str) -> chat_pb2.ChatPayload:
    return chat_payload.to_payload(parse(ChatRequest, raw.encode(), max_depth=64), LIMITS)


def completion_of(**fields: object) -> completion_pb2.CompletionPayload:
    raw = json.dumps({**TEXT, **fields}).encode()
    return completion_payload.to_payload(parse(CompletionRequest, raw, max_depth=64), LIMITS)


@pytest.mark.parametrize("payload_of", [chat_of, completion_of])
def test_unknown_fields_are_passed_through_unchanged(payload_of: Any) -> None:
    given = {"mirostat": 2, "dry_base": 1.0, "samplers": ["top_k", {"b": None, "a": True}], "ü": "x", "off": False}
    payload = payload_of(**given)
    assert plain_object(payload.extra_parameters) == given
    assert isinstance(plain_object(payload.extra_parameters)["dry_base"], float)
    assert [member.name for member in payload.extra_parameters.fields] == list(given)


ABOUT_ANOTHER_SERVICE: dict[str, object] = {
    "metadata": {"a": "b"},
    "moderation": {"model": "m"},
    "prompt_cache_key": "x",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "x",
    "service_tier": "auto",
    "store": True,
    "user": "x",
}


def test_every_field_of_another_service_is_tested() -> None:
    assert set(ABOUT_ANOTHER_SERVICE) == NOT_USED


@pytest.mark.parametrize("payload_of", [chat_of, completion_of])
@pytest.mark.parametrize(
    "fields",
    [
        {"mirostat": None},
        {"repeat_penalty": 1.0, "repetition_penalty": 1.5},
        {"stream_options": None, "logit_bias": None},
        *({name: value} for name, value in ABOUT_ANOTHER_SERVICE.items()),
    ],
    ids=str,
)
def test_absent_known_and_foreign_fields_are_not_passed_through(payload_of: Any, fields: dict[str, object]) -> None:
    assert not payload_of(**fields).HasField("extra_parameters")


def test_request_cannot_set_agent_only_fields() -> None:
    payload = chat_of(behaviour={"tools": ["files.read"]}, platform_prompt=True, agent="coder", signals=["A"])
    given = plain_object(payload.extra_parameters)
    assert set(given) == {"behaviour", "platform_prompt", "agent", "signals"}, "foreign parameters, and nothing else"
    payload.ClearField("extra_parameters")
    assert payload == chat_of()


def deep(depth: int) -> dict[str, object]:
    value: dict[str, object] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def too_much(field: str, **fields: object) -> Any:
    return pytest.param(fields, field, id=f"{field[:20]}-{str(fields)[:30]}")


@pytest.mark.parametrize("payload_of", [chat_of, completion_of])
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        too_much("x64", **{f"x{n}": 1 for n in range(MAX_EXTRA_FIELDS + 1)}),
        too_much("big", small=1, big="x" * MAX_EXTRA_BYTES),
        too_much("second", first="ü" * (MAX_EXTRA_BYTES // 4), second="ü" * (MAX_EXTRA_BYTES // 4)),
        too_much("n" * 64, **{"n" * 129: 1}),
        too_much("body", **{"": 1}),
        too_much("deep", deep=deep(40)),
        too_much("huge", huge=[10**400]),
    ],
)
def test_oversized_extra_field_error_names_it(payload_of: Any, fields: dict[str, object], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        payload_of(**fields)
    assert caught.value.field == field


def test_invalid_number_error_names_its_field() -> None:
    with pytest.raises(FieldError) as caught:
        _chat(json.dumps({**CHAT, "wild": 0}).replace('"wild": 0', '"wild": 1e999'))
    assert caught.value.field == "wild"


def test_largest_accepted_extra_fields_survive_serialization() -> None:
    most: dict[str, object] = {f"x{n}": deep(25) for n in range(MAX_EXTRA_FIELDS - 1)}
    most["rest"] = "x" * (
        MAX_EXTRA_BYTES - sum(len(json.dumps({k: v}, separators=(",", ":"))) for k, v in most.items()) - 100
    )
    request = generation_service_pb2.GenerateRequest(chat=chat_of(**most))
    assert len(request.chat.extra_parameters.fields) == MAX_EXTRA_FIELDS
    assert generation_service_pb2.GenerateRequest.FromString(request.SerializeToString()) == request


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, None),
        ({"enable_thinking": None, "chat_template_kwargs": None}, None),
        ({"chat_template_kwargs": {}}, None),
        ({"chat_template_kwargs": {"enable_thinking": None}}, None),
        ({"enable_thinking": False}, False),
        ({"enable_thinking": True}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": None}}, True),
    ],
)
def test_thinking_may_be_requested_in_either_place(fields: dict[str, object], thinking: bool | None) -> None:
    payload = chat_of(**fields)
    assert (payload.thinking if payload.HasField("thinking") else None) is thinking
    assert not payload.HasField("extra_parameters")


def test_other_template_arguments_are_passed_through() -> None:
    payload = chat_of(chat_template_kwargs={"enable_thinking": False, "date": "today", "tools_in": [1]})
    assert not payload.thinking
    assert plain_object(payload.extra_parameters) == {"chat_template_kwargs": {"date": "today", "tools_in": [1]}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"enable_thinking": 0}, "enable_thinking"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"stream": True, "stream_options": {"include_weft_events": "yes"}}, "stream_options.include_weft_events"),
    ],
)
def test_invalid_thinking_or_events_option_error_names_its_field(fields: dict[str, object], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        chat_of(**fields)
    assert caught.value.field == field


def test_text_completion_passes_thinking_options_through() -> None:
    assert plain_object(completion_of(enable_thinking=True).extra_parameters) == {"enable_thinking": True}


def test_embeddings_ignore_unknown_fields() -> None:
    raw = json.dumps({"model": "m", "input": "p", "unheard_of": {"a": "x" * MAX_EXTRA_BYTES}}).encode()
    plain = json.dumps({"model": "m", "input": "p"}).encode()
    asked, bare = (parse(EmbeddingRequest, each, max_depth=64) for each in (raw, plain))
    assert embedding_payload.to_payload(asked, LIMITS) == embedding_payload.to_payload(bare, LIMITS)
