"""The body of a request to a server: extra parameters, warnings, and thinking."""

from dataclasses import replace
from typing import Any

import pytest
from kit.failures import fails

from runner_svc.openai_upstream import openai_request as request
from runner_svc.openai_upstream.openai_request import PreparedBody
from runner_svc.policy.parameters import EngineParameters, Grammar, Number, ParameterProfile, StructuredOutputs
from runner_svc.runtimes.llama_server.runtime import PARAMETERS as LLAMA_SERVER_PARAMETERS
from runner_svc.runtimes.openai_http.runtime import PARAMETERS as OPENAI_HTTP_PARAMETERS
from weft.api.common.v1 import chat_pb2, completion_pb2, sampling_pb2, warning_pb2
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.text.json_objects import to_json_object

LLAMA = ParameterProfile(engine=LLAMA_SERVER_PARAMETERS)
ATTACHED = ParameterProfile(engine=OPENAI_HTTP_PARAMETERS)


def chat_body(payload: chat_pb2.ChatPayload, model: str = "", profile: ParameterProfile = LLAMA) -> PreparedBody:
    return request.chat_body(payload, model, profile)


def completion_body(
    payload: completion_pb2.CompletionPayload, model: str = "", profile: ParameterProfile = LLAMA
) -> PreparedBody:
    return request.completion_body(payload, model, profile)


def _chat(extra: dict[str, Any] | None = None, **fields: Any) -> chat_pb2.ChatPayload:
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text="hi")])
    payload = chat_pb2.ChatPayload(messages=[message], **fields)
    if extra is not None:
        payload.extra_parameters.CopyFrom(to_json_object(extra, "extra"))
    return payload


def test_body_without_extras_has_only_standard_fields() -> None:
    prepared = chat_body(_chat())
    assert set(prepared.body) == {"stream", "stream_options", "messages"}
    assert prepared.warnings == []


def test_known_extra_is_in_the_body_and_an_unknown_one_in_a_warning() -> None:
    prepared = chat_body(_chat({"mirostat": 2, "frobnicate": 1}))
    assert prepared.body["mirostat"] == 2
    assert "frobnicate" not in prepared.body
    (event,) = prepared.warnings
    assert event.warning.code == warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER
    assert event.warning.field == "frobnicate"


def test_completion_accepts_extras_too() -> None:
    payload = completion_pb2.CompletionPayload(prompts=[completion_pb2.PromptInput(text="a")])
    payload.extra_parameters.CopyFrom(to_json_object({"dry_multiplier": 0.8, "id_slot": 0}, "extra"))
    prepared = completion_body(payload)
    assert prepared.body["dry_multiplier"] == 0.8
    assert [event.warning.field for event in prepared.warnings] == ["id_slot"]


def test_template_arguments_are_warned_about_without_a_template() -> None:
    extra = to_json_object({"chat_template_kwargs": {"a": 1}}, "extra_parameters")
    payload = completion_pb2.CompletionPayload(prompts=[completion_pb2.PromptInput(text="a")], extra_parameters=extra)
    prepared = completion_body(payload)
    assert "chat_template_kwargs" not in prepared.body
    assert [event.warning.field for event in prepared.warnings] == ["chat_template_kwargs"]
    assert completion_body(payload, "m", replace(LLAMA, passthrough=True)).body["chat_template_kwargs"] == {"a": 1}


def test_extra_never_replaces_a_contract_field() -> None:
    profile = replace(LLAMA, passthrough=True)
    extra = {"temperature": 2, "Temperature": 2, "stream": False, "seed": 1}
    payload = _chat(extra, sampling=sampling_pb2.SamplingParams(temperature=0))
    body = chat_body(payload, "m", profile).body
    assert "Temperature" not in body
    assert body["temperature"] == 0
    assert body["stream"] is True
    assert body["seed"] == 1


def _with_tools(*names: str, forced: str) -> chat_pb2.ChatPayload:
    tools = [chat_pb2.Tool(function=chat_pb2.FunctionTool(name=name)) for name in names]
    return _chat(tools=tools, tool_choice=chat_pb2.ToolChoice(function_name=forced))


def test_forced_function_for_llama_server_is_the_only_tool_and_required() -> None:
    """It treats a choice by name as auto, and says so in its log only."""
    body = chat_body(_with_tools("a", "b", forced="b")).body
    assert [tool["function"]["name"] for tool in body["tools"]] == ["b"]
    assert body["tool_choice"] == "required"
    with pytest.raises(FieldError, match="not among the tools"):
        chat_body(_with_tools("a", forced="c"))


def test_forced_function_for_an_attached_server_is_passed_by_name() -> None:
    body = chat_body(_with_tools("a", "b", forced="b"), profile=ATTACHED).body
    assert len(body["tools"]) == 2
    assert body["tool_choice"] == {"type": "function", "function": {"name": "b"}}


@pytest.mark.parametrize("asked", [True, False])
def test_thinking_reaches_the_template_as_requested(asked: bool) -> None:
    assert chat_body(_chat(thinking=asked)).body["chat_template_kwargs"] == {"enable_thinking": asked}


@pytest.mark.parametrize("default", [True, False])
def test_model_thinking_default_applies_if_the_request_sets_none(default: bool) -> None:
    profile = replace(LLAMA, thinking=default)
    assert chat_body(_chat(), "", profile).body["chat_template_kwargs"] == {"enable_thinking": default}
    asked = chat_body(_chat(thinking=not default), "", profile).body
    assert asked["chat_template_kwargs"] == {"enable_thinking": not default}


def test_effort_none_disables_thinking_unless_it_is_requested() -> None:
    none = chat_pb2.REASONING_EFFORT_NONE
    thinks = replace(LLAMA, thinking=True)
    assert chat_body(_chat(reasoning_effort=none), "", thinks).body["chat_template_kwargs"] == {
        "enable_thinking": False
    }
    both = chat_body(_chat(reasoning_effort=none, thinking=True)).body
    assert both["chat_template_kwargs"] == {"enable_thinking": True}
    assert both["reasoning_effort"] == "none"


def test_effort_none_is_passed_to_an_attached_server_only_as_reasoning_effort() -> None:
    body = chat_body(_chat(reasoning_effort=chat_pb2.REASONING_EFFORT_NONE), "m", ATTACHED).body
    assert body["reasoning_effort"] == "none"
    assert "chat_template_kwargs" not in body


def test_template_arguments_are_kept_beside_thinking() -> None:
    arguments = {"chat_template_kwargs": {"language": "en", "enable_thinking": True}}
    body = chat_body(_chat(arguments, thinking=False)).body
    assert body["chat_template_kwargs"] == {"language": "en", "enable_thinking": False}
    asked = chat_body(_chat(arguments), "", replace(LLAMA, thinking=False)).body
    assert asked["chat_template_kwargs"]["enable_thinking"] is True


def test_non_boolean_thinking_is_refused() -> None:
    with fails(field="chat_template_kwargs.enable_thinking"):
        chat_body(_chat({"chat_template_kwargs": {"enable_thinking": "yes"}}))
    with fails(field="chat_template_kwargs"):
        chat_body(_chat({"chat_template_kwargs": 1}), "", replace(LLAMA, passthrough=True))


@pytest.mark.parametrize(
    ("media_type", "name", "at_llama_server"),
    [("audio/wav", "wav", "wav"), ("audio/mpeg", "mp3", "mp3"), ("audio/flac", "flac", "wav")],
)
def test_recording_format_has_its_api_name_or_one_that_the_engine_takes(
    media_type: str, name: str, at_llama_server: str
) -> None:
    audio = chat_pb2.MediaPart(data=b"abc", media_type=media_type)
    message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(audio=audio)])
    for profile, shown in ((LLAMA, at_llama_server), (ATTACHED, name)):
        (part,) = chat_body(chat_pb2.ChatPayload(messages=[message]), "", profile).body["messages"][0]["content"]
        assert part == {"type": "input_audio", "input_audio": {"data": "YWJj", "format": shown}}


def test_languages_for_a_non_translation_model_are_warned_about() -> None:
    arguments = {"source_lang_code": "de", "target_lang_code": "en", "enable_thinking": True}
    payload = _chat({"chat_template_kwargs": arguments})
    plain = ParameterProfile(
        engine=LLAMA_SERVER_PARAMETERS, templates=("{% for message in messages %}{{ message.content }}{% endfor %}",)
    )
    warned = [event.warning.field for event in chat_body(payload, "", plain).warnings]
    assert warned == ["chat_template_kwargs.source_lang_code", "chat_template_kwargs.target_lang_code"]
    translates = ParameterProfile(
        engine=LLAMA_SERVER_PARAMETERS, templates=("", "{{ source_lang_code }} to {{ target_lang_code }}")
    )
    assert chat_body(payload, "", translates).warnings == []
    assert chat_body(payload, "", replace(LLAMA, templates=None)).warnings == []


LIMITED = EngineParameters(
    engine="a small engine",
    allowed={"repetition_penalty": Number(0, 2)},
    untaken=frozenset({"top_k", "n"}),
    renamed={"repeat_penalty": "repetition_penalty"},
)


def _sampled(extra: dict[str, Any] | None = None) -> chat_pb2.ChatPayload:
    return _chat(extra, sampling=sampling_pb2.SamplingParams(top_k=5, repeat_penalty=1.1))


def test_unsupported_engine_parameters_are_dropped_with_a_warning_and_others_renamed() -> None:
    prepared = chat_body(_sampled(), "m", ParameterProfile(engine=LIMITED))
    assert "top_k" not in prepared.body
    assert "repeat_penalty" not in prepared.body
    assert prepared.body["repetition_penalty"] == pytest.approx(1.1)
    assert [event.warning.field for event in prepared.warnings] == ["top_k"]


def test_completion_drops_parameters_unsupported_by_the_engine() -> None:
    payload = completion_pb2.CompletionPayload(
        prompts=[completion_pb2.PromptInput(text="a")], sampling=sampling_pb2.SamplingParams(top_k=5)
    )
    prepared = completion_body(payload, "m", ParameterProfile(engine=LIMITED))
    assert "top_k" not in prepared.body
    assert [event.warning.field for event in prepared.warnings] == ["top_k"]


def test_nested_engine_parameter_is_sent_at_its_path() -> None:
    engine = EngineParameters(
        engine="e", allowed={"grammar": Grammar(), "structured": StructuredOutputs()}, members={"grammar": "structured"}
    )
    body = chat_body(_chat({"grammar": 'root ::= "a"'}), "m", ParameterProfile(engine=engine)).body
    assert body["structured"] == {"grammar": 'root ::= "a"'}
    assert "grammar" not in body
    both = _chat({"grammar": 'root ::= "a"', "structured": {"regex": "a"}})
    assert chat_body(both, "m", ParameterProfile(engine=engine)).body["structured"].keys() == {"grammar", "regex"}


def test_extra_parameter_does_not_replace_a_renamed_one() -> None:
    prepared = chat_body(_sampled({"repetition_penalty": 1.9}), "m", ParameterProfile(engine=LIMITED))
    assert prepared.body["repetition_penalty"] == pytest.approx(1.1)


def test_several_choices_are_refused_for_a_single_choice_engine() -> None:
    profile = ParameterProfile(engine=LIMITED)
    with fails(field="n"):
        chat_body(_chat(choice_count=2), "m", profile)
    single = chat_body(_chat(choice_count=1), "m", profile)
    assert "n" not in single.body
    assert single.warnings == []


def test_passthrough_sends_every_parameter() -> None:
    prepared = chat_body(_sampled(), "m", ParameterProfile(engine=LIMITED, passthrough=True))
    assert prepared.body["top_k"] == 5
    assert prepared.warnings == []


@pytest.mark.parametrize(
    ("templates", "effort", "warned"),
    [
        (("{{ messages }}",), chat_pb2.REASONING_EFFORT_HIGH, True),
        (("{{ reasoning_effort }}",), chat_pb2.REASONING_EFFORT_HIGH, False),
        (None, chat_pb2.REASONING_EFFORT_HIGH, False),
        (("{{ messages }}",), chat_pb2.REASONING_EFFORT_NONE, False),
        (("{{ messages }}",), chat_pb2.REASONING_EFFORT_UNSPECIFIED, False),
    ],
)
def test_effort_not_read_by_the_template_is_warned_about(
    templates: tuple[str, ...] | None, effort: chat_pb2.ReasoningEffort.ValueType, warned: bool
) -> None:
    prepared = chat_body(_chat(reasoning_effort=effort), "", replace(LLAMA, templates=templates))
    assert [event.warning.field for event in prepared.warnings] == (["reasoning_effort"] if warned else [])


def test_extra_fields_of_an_engine_turn_are_sent_back() -> None:
    signed = {"extra_content": {"s": 1}, "other": 2, "function": {"thought_signature": "T"}}
    payload = _chat()
    message = payload.messages.add(role=chat_pb2.ROLE_ASSISTANT)
    message.extra_fields.CopyFrom(to_json_object({"reasoning_details": [1], "other": 2}, "extra"))
    call = message.tool_calls.add(id="c", name="f", arguments_text="{}")
    call.extra_fields.CopyFrom(to_json_object(signed, "extra"))
    made = {"id": "c", "type": "function"}
    function = {"thought_signature": "T", "name": "f", "arguments": "{}"}
    plain = {"role": "assistant", "content": None, "reasoning_details": [1]}
    own = {**made, "extra_content": {"s": 1}, "function": function}
    sent = chat_body(payload, profile=ATTACHED).body["messages"][-1]
    assert sent == {**plain, "other": 2, "tool_calls": [{**own, "other": 2}]}
    strict = replace(ATTACHED, engine=replace(ATTACHED.engine, is_strict=True))
    assert chat_body(payload, profile=strict).body["messages"][-1] == {**plain, "tool_calls": [own]}
