"""What a runner learns from an engine's refusals: the form of conversations, and the room for an answer."""

import time
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kit.failures import fails

from runner_svc.backend.port import Backend, CallInfo
from runner_svc.instance.accepted_forms import AcceptedForms
from runner_svc.instance.admission import AdmittedRequest
from runner_svc.policy.answer_room import NO_LIMIT, blames_answer_limit, room_for_answer
from runner_svc.request_records import RequestRecord
from weft.api.common.v1 import chat_pb2, completion_pb2, event_pb2, receipt_pb2, sampling_pb2, warning_pb2
from weft.dispatch.frames import Frame
from weft.dispatch.history_forms import MAX_FORM_TRIES, Form
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

Event = event_pb2.InferenceEvent
USER, MODEL = chat_pb2.ROLE_USER, chat_pb2.ROLE_ASSISTANT
Judge = Callable[[Any], str]
"""Returns why an engine refuses a payload; empty: it accepts it."""


class Engine:
    """An engine that refuses what `judge` refuses, after a warning of its own."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.seen: list[Any] = []
        self.accepted = AcceptedForms()

    async def generate(self, payload: Any, call: CallInfo) -> AsyncGenerator[Frame]:
        del call
        self.seen.append(payload)
        yield [Event(warning=warning_pb2.Warning(field="own"))]
        if words := self.judge(payload):
            raise WeftError(Reason.BACKEND_REJECTED, f"the engine answered 400: {words}")
        yield [Event(delta=event_pb2.Delta(text="b"))]
        yield [Event(finished=event_pb2.Finished(receipt=receipt_pb2.Receipt()))]

    async def asked(self, payload: Any) -> list[str]:
        """Returns the fields of the warnings that a caller gets with the answer."""
        clock = FakeClock()
        record = RequestRecord(
            request_id="r", model="m", clock=clock, started=0.0, started_at=clock.utc_now(), last_progress=0.0
        )
        work = AdmittedRequest(record, cast("Backend", SimpleNamespace(generate=self.generate)), lambda _: None)
        work.forms = self.accepted
        frames = [frame async for frame in work.generate(payload, CallInfo(request_id="r", traceparent=""))]
        events = [event for frame in frames for event in frame]
        assert events[-1].HasField("finished")
        return [event.warning.field for event in events if event.HasField("warning")]


def conversation(limit: int = 0) -> chat_pb2.ChatPayload:
    def text(*parts: str) -> list[chat_pb2.ContentPart]:
        return [chat_pb2.ContentPart(text=part) for part in parts]

    call = chat_pb2.ToolCallRecord(id="toolu_7QfXw2RkBn4T", name="look", arguments_text="{}")
    sampling = sampling_pb2.SamplingParams(max_tokens=limit) if limit else None
    return chat_pb2.ChatPayload(
        messages=[
            chat_pb2.ChatMessage(role=USER, content=text("First.", "Second.")),
            chat_pb2.ChatMessage(role=MODEL, reasoning="well", tool_calls=[call]),
            chat_pb2.ChatMessage(role=chat_pb2.ROLE_TOOL, tool_call_id=call.id, content=text("two")),
        ],
        sampling=sampling,
    )


def strict(payload: chat_pb2.ChatPayload) -> str:
    """Refuses as Mistral's API does: ids, then reasoning, then texts."""
    for message in payload.messages:
        if any(len(call.id) != 9 for call in message.tool_calls):
            return "Tool call id was X but must be a-z, A-Z, 0-9, with a length of 9."
        if message.HasField("reasoning"):
            return "messages.1.assistant.reasoning_content: Extra inputs are not permitted"
        if len(message.content) > 1:
            return "Input should be a valid string: content"
    return ""


async def test_several_forms_are_found_for_one_engine_and_the_next_request_needs_no_second_try() -> None:
    engine = Engine(strict)
    assert await engine.asked(conversation()) == ["messages", "messages", "messages", "own"]
    assert len(engine.seen) == 4
    assert await engine.asked(conversation()) == ["messages", "messages", "messages", "own"]
    assert len(engine.seen) == 5


async def test_other_conversations_of_an_engine_with_a_form_are_sent_unchanged_and_without_a_warning() -> None:
    engine = Engine(strict)
    await engine.asked(conversation())
    plain = chat_pb2.ChatPayload(messages=[chat_pb2.ChatMessage(role=USER, content=[chat_pb2.ContentPart(text="x")])])
    assert await engine.asked(plain) == ["own"]
    assert engine.seen[-1] == plain


async def test_image_that_an_engine_refuses_does_not_take_those_of_other_conversations() -> None:
    """One broken image replaced the images of all later conversations of the model by notes."""

    def looks_at(image: bytes) -> chat_pb2.ChatPayload:
        chat = conversation()
        chat.messages[0].content.add().image.data = image
        chat.messages.add(role=USER).content.add(text="And now?")
        return chat

    engine = Engine(lambda chat: "failed to load image" if b"broken" in chat.SerializeToString() else "")
    assert await engine.asked(looks_at(b"broken")) == ["messages[0].content[2]", "own"]
    assert await engine.asked(looks_at(b"whole")) == ["own"]
    assert engine.seen[-1] == looks_at(b"whole")


async def test_form_that_the_engine_refuses_later_is_forgotten() -> None:
    """A provider may begin to want the reasoning, or another model may have its name."""
    engine = Engine(strict)
    await engine.asked(conversation())
    engine.judge = lambda chat: "" if len(chat.messages[0].content) > 1 else "content: must be a list, not a string"
    await engine.asked(conversation())
    assert not engine.accepted.forms
    engine.seen.clear()
    await engine.asked(conversation())
    assert len(engine.seen) == 1


@pytest.mark.parametrize(
    "words", ["temperature must be at most 2", "CUDA error", "max_tokens must be positive", "x" * 5_000]
)
async def test_unrelated_refusal_is_not_repeated_and_changes_no_known_form(words: str) -> None:
    engine = Engine(lambda _: words)
    engine.accepted.forms = frozenset({Form.SHORT_IDS})
    with fails(Reason.BACKEND_REJECTED):
        await engine.asked(conversation(limit=100))
    assert len(engine.seen) == 1
    assert engine.accepted.forms == frozenset({Form.SHORT_IDS})


@pytest.mark.parametrize(
    "words",
    [
        "template: role: content must be a string: tool call id must have 9 characters: extra_forbidden reasoning",
        "max_tokens 32000 is too large: 7 is the maximum of max_tokens",
        "maximum context length is 8192 tokens: 3000 input tokens and max_tokens 32000",
        "max_tokens is beyond the context",
    ],
)
async def test_engine_that_refuses_everything_gets_a_bounded_number_of_tries(words: str) -> None:
    engine = Engine(lambda _: words)
    with fails(Reason.BACKEND_REJECTED):
        await engine.asked(conversation(limit=32_000))
    assert len(engine.seen) <= MAX_FORM_TRIES + 1
    assert not engine.accepted.forms


@pytest.mark.parametrize("of_chat", [True, False])
async def test_limit_that_does_not_fit_beside_the_prompt_is_lowered_with_a_warning(of_chat: bool) -> None:
    """Coding agents send 32,000, and the refusal made them shorten a conversation that fits."""
    words = "The maximum context length is 8192 tokens and your request has 3000 input tokens (max_tokens={})"
    engine = Engine(lambda asked: words.format(asked.sampling.max_tokens) if asked.sampling.max_tokens > 5192 else "")
    payload: Any = conversation(limit=32_000)
    if not of_chat:
        prompts = [completion_pb2.PromptInput(text="x")]
        payload = completion_pb2.CompletionPayload(prompts=prompts, sampling=payload.sampling)
    assert await engine.asked(payload) == ["max_tokens", "own"]
    assert [each.sampling.max_tokens for each in engine.seen] == [32_000, 5192]
    assert payload.sampling.max_tokens == 32_000


async def test_limit_beyond_a_context_is_left_out_if_the_engine_does_not_say_what_fits() -> None:
    words = "max_tokens=32000 cannot be greater than max_model_len=max_total_tokens=8192."
    engine = Engine(lambda asked: words if asked.sampling.max_tokens > 8192 else "")
    assert await engine.asked(conversation(limit=32_000)) == ["max_tokens", "own"]
    assert not engine.seen[1].sampling.HasField("max_tokens")


CONTEXT = "This model's maximum context length is 8192 tokens"
ROOM = [
    (f"max_tokens is too large: 32000. {CONTEXT} and your request has 3000 input tokens (32000 > 8192 - 3000).", 5192),
    (f"{CONTEXT}. However, you requested 35000 tokens (3000 in the messages, 32000 in the completion).", 5192),
    (
        (
            f"{CONTEXT}. However, you requested 35100 tokens (3000 in the messages, 100 in the functions, and "
            "32000 in the completion)."
        ),
        5092,
    ),
    (
        (
            f"{CONTEXT}. However, you requested 32000 output tokens and your prompt contains at least 3000 input "
            "tokens, for a total of at least 35000 tokens. Please reduce the length of the input prompt."
        ),
        5192,
    ),
    (
        (
            "Requested token count exceeds the model's maximum context length of 8192 tokens. You requested a total of "
            "35000 tokens: 3000 tokens from the input messages and 32000 tokens for the completion."
        ),
        5192,
    ),
    (
        "`inputs` tokens + `max_new_tokens` must be <= 8192. Given: 3000 `inputs` tokens and 32000 `max_new_tokens`",
        5192,
    ),
    ("input length and `max_tokens` exceed context limit: 180000 + 32000 > 200000, decrease input length", 20_000),
    ("max_tokens: 32000 > 8192, which is the maximum allowed number of output tokens for claude-3-5-sonnet", 8192),
    ("max_tokens is too large: 32000. This model supports at most 16384 completion tokens", 16_384),
    ("Invalid max_tokens value, the valid range of max_tokens is [1, 8192]", 8192),
    ("Please reduce the length of the messages or completion. Current length is 35000 while limit is 8192", 5192),
    ("max_total_tokens (35000) must be less than or equal to max_seq_len (8192)", 5192),
    ("Requested tokens (35000) exceed context window of 8192", 5192),
    ("max_tokens=32000 cannot be greater than max_model_len=8192. Please request fewer output tokens.", NO_LIMIT),
]
PROMPT_ALONE = [
    "prompt is too long: 208310 tokens > 200000 maximum",
    "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
    "request (9000 tokens) exceeds the available context size (8192 tokens), try increasing it",
    f"{CONTEXT}. However, you requested 41000 tokens (9000 in the messages, 32000 in the completion).",
    f"{CONTEXT}. However, your messages resulted in 9000 tokens. Please reduce the length of the messages.",
    "`inputs` must have less than 4096 tokens. Given: 5000",
    "temperature must be at most 2",
]


@pytest.mark.parametrize(("words", "room"), ROOM)
def test_room_for_an_answer_is_read_from_any_engines_words(words: str, room: int) -> None:
    assert room_for_answer(words, 32_000) == room
    assert blames_answer_limit(words)


@pytest.mark.parametrize("words", ["1,", "1", "context ", "max_tokens 1 ", "<= ", "input 1,000 ", "limit 9 + "])
def test_hostile_refusal_is_read_quickly(words: str) -> None:
    """ "1,1,1,..." of 64 KiB took eight minutes."""
    began = time.monotonic()
    room_for_answer(words * 30_000, 32_000)
    assert time.monotonic() - began < 0.5


@pytest.mark.parametrize("words", PROMPT_ALONE)
def test_prompt_that_is_too_long_itself_is_told_from_the_limit(words: str) -> None:
    assert room_for_answer(words, 32_000) is None
    assert not blames_answer_limit(words)
