"""The variables of a chat template, and the completion that is sent in place of a chat."""

from collections.abc import Mapping
from typing import Any

import pytest
from kit.failures import fails

from runner_svc.engine_host.request import prepare
from runner_svc.openai_upstream.request import PreparedBody
from runner_svc.policy.parameters import ParameterProfile
from runner_svc.runtimes.llama_cpp_python.runtime import PARAMETERS as LLAMA_CPP_PYTHON_PARAMETERS
from runner_svc.templates.sandbox import ModelTemplates
from weft.api.common.v1 import chat_pb2, completion_pb2, sampling_pb2
from weft.dispatch.frames import GenerationPayload

TEMPLATES = ModelTemplates(usual="usual", tool_use="tools", bos_token="<s>", eos_token="</s>")
PROFILE = ParameterProfile(engine=LLAMA_CPP_PYTHON_PARAMETERS)


class Renderer:
    def __init__(self) -> None:
        self.template = ""
        self.variables: Mapping[str, Any] = {}

    async def render(self, template: str, variables: Mapping[str, Any]) -> str:
        self.template, self.variables = template, variables
        return "prompt"


async def _prepared(payload: GenerationPayload, profile: ParameterProfile = PROFILE) -> tuple[PreparedBody, Renderer]:
    renderer = Renderer()
    return await prepare(payload, TEMPLATES, profile, renderer.render), renderer


def _message(role: "chat_pb2.Role.ValueType", *texts: str, **fields: Any) -> chat_pb2.ChatMessage:
    return chat_pb2.ChatMessage(role=role, content=[chat_pb2.ContentPart(text=text) for text in texts], **fields)


def _call(arguments: str) -> chat_pb2.ToolCallRecord:
    return chat_pb2.ToolCallRecord(id="c1", name="f", arguments_text=arguments)


async def test_conversation_is_passed_to_the_template_in_its_expected_form() -> None:
    payload = chat_pb2.ChatPayload(
        messages=[
            _message(chat_pb2.ROLE_DEVELOPER, "Be brief."),
            _message(chat_pb2.ROLE_USER, "one", "two"),
            _message(chat_pb2.ROLE_ASSISTANT, tool_calls=[_call('{"a": 1}'), _call("{broken"), _call("[1]")]),
            _message(chat_pb2.ROLE_TOOL, "result", tool_call_id="c1"),
        ],
        tools=[chat_pb2.Tool(function=chat_pb2.FunctionTool(name="f"))],
    )
    prepared, renderer = await _prepared(payload)
    system, user, assistant, tool = renderer.variables["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert user["content"] == "one\ntwo"
    assert assistant["content"] == "", "a template adds texts together, and none is not a text"
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [
        {"a": 1},
        {"arguments": "{broken"},
        {"arguments": "[1]"},
    ]
    assert tool["tool_call_id"] == "c1"
    assert renderer.template == "tools"
    assert renderer.variables["tools"][0]["function"]["name"] == "f"
    assert renderer.variables["add_generation_prompt"] is True
    assert (renderer.variables["bos_token"], renderer.variables["eos_token"]) == ("<s>", "</s>")
    assert "enable_thinking" not in renderer.variables
    assert prepared.body["prompt"] == ["prompt"]
    assert not prepared.body["add_special"]
    assert prepared.body["stop"] == ["</s>"]


@pytest.mark.parametrize(
    ("asked", "default", "given"), [(None, None, None), (None, True, True), (False, True, False), (True, None, True)]
)
async def test_thinking_is_a_template_argument(asked: bool | None, default: bool | None, given: bool | None) -> None:
    payload = chat_pb2.ChatPayload(messages=[_message(chat_pb2.ROLE_USER, "hi")], thinking=asked)
    _, renderer = await _prepared(payload, ParameterProfile(engine=LLAMA_CPP_PYTHON_PARAMETERS, thinking=default))
    assert renderer.variables.get("enable_thinking") is given
    assert renderer.template == "usual"


async def test_sampling_uses_library_names_and_omits_unset_fields() -> None:
    payload = chat_pb2.ChatPayload(
        messages=[_message(chat_pb2.ROLE_USER, "hi")],
        sampling=sampling_pb2.SamplingParams(temperature=0, top_p=0.5, max_tokens=7, seed=3, stop=["x"]),
        choice_count=2,
    )
    body = (await _prepared(payload))[0].body
    assert body == {
        "temp": 0,
        "top_p": 0.5,
        "max_tokens": 7,
        "seed": 3,
        "stop": ["x", "</s>"],
        "n": 2,
        "prompt": ["prompt"],
        "add_special": False,
        "logit_bias": {},
        "grammar": "",
        "json_schema": "",
    }


async def test_completion_passes_prompts_unchanged_and_adds_no_stop_string() -> None:
    ids = completion_pb2.PromptInput(tokens=completion_pb2.TokenIds(ids=[5, 6]))
    text = completion_pb2.PromptInput(text="once")
    for prompts, expected in (([text], ["once"]), ([ids], [[5, 6]]), ([text, ids], ["once", [5, 6]])):
        body = (await _prepared(completion_pb2.CompletionPayload(prompts=prompts)))[0].body
        assert (body["prompt"], body["add_special"], body["stop"]) == (expected, True, [])


async def test_grammar_and_response_format_are_mutually_exclusive() -> None:
    payload = chat_pb2.ChatPayload(
        messages=[_message(chat_pb2.ROLE_USER, "hi")], response_format=chat_pb2.ResponseFormat(json_object=True)
    )
    assert (await _prepared(payload))[0].body["json_schema"] == '{"type": "object"}'
    payload.extra_parameters.fields.add(name="grammar").value.string_value = 'root ::= "a"'
    with fails(field="grammar"):
        await _prepared(payload)
