"""The real openai client reads any answer to its end or raises an APIError, wherever the answer breaks off."""

from dataclasses import dataclass
from typing import Any

import openai
import pytest
from answer_events import IDENTITY, LOST, Event, Frame, StreamServer, call, finished, piece, started, stopped
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from test_gateway_answers import tool_calls

from gateway.answers.sse import StreamEncoder
from gateway.openai.chat_answer import ChatAnswer, ChatStream
from gateway.openai.completions import CompletionStream
from weft.api.common.v1 import event_pb2, usage_pb2, warning_pb2

REASONS = {"STOP": "stop", "LENGTH": "length", "TOOL_CALLS": "tool_calls", "CONTENT_FILTER": "content_filter"}
TEXT = st.text(alphabet=st.sampled_from('ab é😀"\\\n\r\u2028{}[]:,\x00data: '), max_size=6)
OPTIONS: dict[str, dict[str, Any]] = {
    "bare": {"include_usage": False, "logprobs": False},
    "usage": {"include_usage": True, "logprobs": False},
    "logprobs": {"include_usage": True, "logprobs": True},
    "events": {"include_usage": True, "logprobs": False, "include_events": True},
}
ASIDES = [
    Event(queued=event_pb2.Queued(position=1)),
    Event(loading=event_pb2.Loading(stage="weights\n\ndata: x")),
    Event(progress=event_pb2.Progress(prompt_tokens=4, processed_tokens=2)),
    Event(warning=warning_pb2.Warning(message="again\nand again")),
    Event(tool_call=event_pb2.ToolCall(id="t", name="files.read")),
    Event(tool_result=event_pb2.ToolResult(id="t", content="x")),
    Event(usage=usage_pb2.Usage(prompt_tokens=4, completion_tokens=2)),
]


@dataclass(frozen=True)
class Case:
    """An answer, and after how many of its frames it breaks off."""

    frames: list[Frame]
    breaks_at: int
    finish_reasons: list[str]
    """Of each choice."""

    @property
    def is_complete(self) -> bool:
        return self.breaks_at == len(self.frames)


def _logprob(token: str) -> event_pb2.TokenLogprob:
    top = [event_pb2.TopLogprob(token="x", logprob=float("-inf"))]
    return event_pb2.TokenLogprob(token=token, logprob=-0.5, raw_bytes=token.encode(), top=top)


@st.composite
def pieces(draw: st.DrawFn, index: int, calls: int) -> Event:
    text, kind = draw(TEXT), draw(st.sampled_from(["text", "reasoning", "refusal", "call", "both", "logprob", ""]))
    match kind:
        case "reasoning" | "refusal":
            return piece(index=index, **{kind: text})
        case "both":
            return piece(text, index=index, reasoning=draw(TEXT))
        case "logprob":
            return piece(text, index=index, logprobs=[_logprob(text), _logprob("b")])
        case "call" if calls:
            numbers = draw(st.lists(st.integers(0, calls - 1), min_size=1, max_size=3))
            told = [call(number, id=f"c{number}", name=f"f{number}", arguments_text=draw(TEXT)) for number in numbers]
            return piece(index=index, tool_calls=told)
    return piece(text if kind == "text" else "", index=index)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any order of the chunks of one to three choices, in any frames, whole or broken off anywhere."""
    queues, reasons = [], []
    for index in range(draw(st.integers(1, 3))):
        reason = draw(st.sampled_from(sorted(REASONS)))
        reasons.append(REASONS[reason])
        end = stopped(reason, draw(TEXT), index=index)
        queues.append([*draw(st.lists(pieces(index, draw(st.integers(0, 3))), max_size=6)), end])
    frames: list[Frame] = [[started("tiny")]]
    while any(queues):
        frames[-1].append(draw(st.sampled_from([queue for queue in queues if queue])).pop(0))
        frames[-1] += draw(st.lists(st.sampled_from(ASIDES), max_size=1))
        if draw(st.booleans()):
            frames.append([])
    frames.append([finished()])
    return Case(frames, draw(st.integers(0, len(frames)) | st.just(len(frames))), reasons)


def encoded(encoder: StreamEncoder, case: Case) -> bytes:
    """The bytes of the stream, with the error event at its end where it breaks off."""
    sent = b"".join(encoder.encode(frame) for frame in case.frames[: case.breaks_at])
    assert encoder.is_done == case.is_complete
    return sent if encoder.is_done else sent + encoder.failure(LOST)


SERVER = StreamServer()
CLIENT = openai.OpenAI(base_url="http://test/v1", api_key="x", max_retries=0, http_client=SERVER.http)


def reading(raw: bytes) -> openai.OpenAI:
    SERVER.raw = raw
    return CLIENT


def asked(case: Case) -> dict[str, Any]:
    return {"model": "chat", "messages": [{"role": "user", "content": "hi"}], "n": len(case.finish_reasons)}


def accumulated(raw: bytes, case: Case) -> Any:
    with reading(raw).chat.completions.stream(**asked(case)) as stream:
        for _ in stream:
            pass
        # Of an answer that is cut off, the client raises errors of its own once it is complete.
        return stream.current_completion_snapshot


def facts(choice: Any) -> dict[str, Any]:
    message = choice.message
    return {
        "finish_reason": choice.finish_reason,
        "role": message.role,
        "content": message.content or "",
        "refusal": message.refusal,
        "reasoning": getattr(message, "reasoning_content", None),
        "calls": tool_calls(message),
        "logprobs": [entry.model_dump() for entry in (choice.logprobs and choice.logprobs.content) or []],
    }


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@given(case=cases())
def test_stream_helper_parses_every_answer_like_the_whole_response(options: dict[str, Any], case: Case) -> None:
    count = len(case.finish_reasons)
    raw = encoded(ChatStream(IDENTITY, choice_count=count, **options), case)
    if not case.is_complete:
        with pytest.raises(openai.APIError):
            accumulated(raw, case)
        return
    answer = ChatAnswer(IDENTITY, choice_count=count, logprobs=options["logprobs"])
    for frame in case.frames:
        answer.add(frame)
    whole, streamed = ChatCompletion.model_validate_json(answer.body()), accumulated(raw, case)
    assert [choice.finish_reason for choice in streamed.choices] == case.finish_reasons
    assert [facts(choice) for choice in streamed.choices] == [facts(choice) for choice in whole.choices]
    if options["include_usage"]:
        assert streamed.usage == whole.usage


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@given(case=cases())
def test_bare_stream_ends_with_every_finish_reason_or_an_error(options: dict[str, Any], case: Case) -> None:
    encoder = ChatStream(IDENTITY, choice_count=len(case.finish_reasons), **options)
    reasons: dict[int, str] = {}
    firsts: dict[int, tuple[str | None, str | None]] = {}
    failure: openai.APIError | None = None
    try:
        for chunk in reading(encoded(encoder, case)).chat.completions.create(**asked(case), stream=True):
            for choice in chunk.choices:
                assert choice.index not in reasons, "nothing comes after the end of a choice"
                said = (choice.delta.role, choice.delta.content)
                assert firsts.setdefault(choice.index, said) is said or choice.delta.role is None
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
    except openai.APIError as error:
        failure = error
    assert (failure is None) == case.is_complete, "no tidy end without an end, no failure after one"
    assert set(firsts.values()) <= {("assistant", "")}
    if case.is_complete:
        assert reasons == dict(enumerate(case.finish_reasons))


@pytest.mark.parametrize("options", [OPTIONS["bare"], OPTIONS["logprobs"]], ids=["bare", "logprobs"])
@given(case=cases())
def test_text_stream_ends_with_every_finish_reason_or_an_error(options: dict[str, bool], case: Case) -> None:
    encoder = CompletionStream(IDENTITY, choice_count=len(case.finish_reasons), **options)
    reasons: dict[int, str] = {}
    failure: openai.APIError | None = None
    try:
        for chunk in reading(encoded(encoder, case)).completions.create(model="tiny", prompt="hi", stream=True):
            reasons |= {choice.index: choice.finish_reason for choice in chunk.choices if choice.finish_reason}
    except openai.APIError as error:
        failure = error
    assert (failure is None) == case.is_complete
    if case.is_complete:
        assert reasons == {index: told.replace("tool_calls", "stop") for index, told in enumerate(case.finish_reasons)}
