"""The variables of a chat template, and the completion that is sent in place of a chat; stop strings and turns."""

import threading
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.failures import fails

from runner_svc.openai_upstream.openai_request import PreparedBody
from runner_svc.policy.parameters import ParameterProfile
from runner_svc.templates.rendered_request import prepare
from runner_svc.templates.sandbox import ModelTemplates
from weft.api.common.v1 import chat_pb2, completion_pb2, sampling_pb2
from weft.dispatch.frames import GenerationPayload
from weft_extensions.engines.engine_host.http_server import Caller, GoneError, Turn, _Turns
from weft_extensions.engines.engine_host.text_routes import StopMatcher
from weft_extensions.engines.llama_cpp_python.runtime import PARAMETERS as LLAMA_CPP_PYTHON_PARAMETERS

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


def _run(pieces: list[bytes], stop: list[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stop)
    shown = [matcher.feed(piece) for piece in pieces]
    return [*shown, matcher.finish()], matcher.stopped


@pytest.mark.parametrize(
    ("pieces", "stop", "shown", "stopped"),
    [
        ([b"a", b"b"], [], ["a", "b", ""], False),
        ([b"a", b"EN", b"D", b"x"], ["END"], ["a", "", "", "", ""], True),
        ([b"aEN", b"b"], ["END"], ["a", "ENb", ""], False),
        ([b"aEN"], ["END"], ["a", "EN"], False),
        ([b"EEND"], ["END"], ["E", ""], True),
        ([b"one two"], ["two", "one"], ["", ""], True),
        ([b"ab", b"abc"], ["ababc"], ["", "", ""], True),
        ([b"\xe2\x98", b"\x83", b"!"], [], ["", "\u2603", "!", ""], False),
        ([b"\xe2", b"x"], [], ["", "\ufffdx", ""], False),
        ([b"\xe2\x98"], [], ["", "\ufffd"], False),
        ([b"a"], [""], ["a", ""], False),
    ],
)
def test_text_is_shown_as_soon_as_it_is_certain(
    pieces: list[bytes], stop: list[str], shown: list[str], stopped: bool
) -> None:
    assert _run(pieces, stop) == (shown, stopped)


@given(
    text=st.text(alphabet="ab\u2603", max_size=30),
    stop=st.lists(st.text(alphabet="ab\u2603", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 90), max_size=10),
)
def test_text_ends_before_the_first_completed_stop_string_for_any_chunking(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    raw = text.encode()
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    pieces = [raw[begin:end] for begin, end in pairwise(places)]
    shown, stopped = _run(pieces, stop)
    joined = "".join(shown)
    assert stopped == any(word in text for word in stop)
    assert text.startswith(joined)
    assert not any(word in joined for word in stop)
    if not stopped:
        assert joined == text


SECONDS = 10.0


class _Caller:
    def __init__(self) -> None:
        self.left = False

    def raise_if_gone(self) -> None:
        if self.left:
            raise GoneError


def _caller() -> Caller:
    return cast("Caller", _Caller())


def test_request_for_all_slots_goes_before_later_requests() -> None:
    turns, order = _Turns(2), list[str]()
    asks = threading.Event()

    def erase() -> None:
        class Asking(_Caller):
            def raise_if_gone(self) -> None:
                asks.set()  # it waits for the slot of the running request

        with turns.hold(Turn.ALL, cast("Caller", Asking())):
            order.append("erased")

    def request() -> None:
        with turns.hold(Turn.ONE, _caller()):
            order.append("request")

    threads = [threading.Thread(target=erase), threading.Thread(target=request)]
    with turns.hold(Turn.ONE, _caller()):
        threads[0].start()
        assert asks.wait(SECONDS)
        threads[1].start()
        threads[1].join(0.1)
        assert not order, "a slot is free, but it is not this request's turn"
    for thread in threads:
        thread.join(SECONDS)
    assert order == ["erased", "request"]


def test_departing_caller_frees_its_place() -> None:
    turns, gone = _Turns(1), _Caller()
    gone.left = True
    for turn in (Turn.ONE, Turn.ALL):
        with turns.hold(Turn.ONE, _caller()), pytest.raises(GoneError), turns.hold(turn, cast("Caller", gone)):
            pass
    with turns.hold(Turn.ALL, _caller()):
        pass
    with turns.hold(Turn.ONE, _caller()):
        pass
