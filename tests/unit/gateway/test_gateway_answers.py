"""Events to OpenAI JSON, streamed and unary."""

import json
from collections.abc import Callable
from functools import partial

import pytest
from answer_events import IDENTITY, Event, Frame, call, calling, data_of, finished, piece, started, stopped
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.answers.sse import StreamEncoder, comment_of
from gateway.anthropic.message_stream import MessagesStream
from gateway.openai.chat_answer import ChatAnswer, ChatStream
from gateway.openai.completions import CompletionAnswer, CompletionStream
from weft.api.common.v1 import event_pb2
from weft.dispatch.frames import apart
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_extensions.ollama.answers import OllamaStream, Shape

CONVERSATIONS: dict[str, Frame] = {
    "plain text": [started("tiny"), piece("a"), piece("b"), stopped(), finished()],
    "text that needs escaping": [piece('"\\\n\r\t\u2028\x00é😀 data: x\n\n'), stopped(), finished()],
    "finish with the last text": [stopped(text="a"), finished()],
    "nothing at all": [stopped(), finished()],
    "a refusal": [piece(refusal="no"), stopped(refusal=" way"), finished()],
    "reasoning and text in one delta": [piece("a", reasoning="r"), stopped(), finished()],
    "a tool call in pieces": [
        calling(call(id="c1", name="f")),
        calling(call(arguments_text='{"a"'), call(arguments_text=":1}")),
        stopped("TOOL_CALLS"),
        finished(),
    ],
    "a backend that repeats id and name": [
        calling(call(id="c1", name="f", arguments_text="{")),
        calling(call(id="c1", name="f", arguments_text="}")),
        stopped("TOOL_CALLS"),
        finished(),
    ],
    "two calls side by side": [
        calling(call(0, id="c1", name="f"), call(1, id="c2", name="g")),
        calling(call(1, arguments_text="{}"), call(0, arguments_text="[]")),
        stopped("TOOL_CALLS"),
        finished(),
    ],
    "cut by length": [piece("a"), stopped("LENGTH"), finished()],
    "filtered": [piece("a"), stopped("CONTENT_FILTER"), finished()],
}


def chat_stream(*, n: int = 1, include_usage: bool = True, logprobs: bool = False) -> ChatStream:
    return ChatStream(IDENTITY, choice_count=n, include_usage=include_usage, logprobs=logprobs)


def chunks_of(encoded: bytes) -> list[ChatCompletionChunk]:
    return [ChatCompletionChunk.model_validate(data) for data in data_of(encoded)]


def whole(frame: Frame) -> ChatCompletion:
    answer = ChatAnswer(IDENTITY, choice_count=1, logprobs=False)
    answer.add(frame)
    return ChatCompletion.model_validate_json(answer.body())


def tool_calls(message: object) -> list[tuple[str, str, str]]:
    calls = getattr(message, "tool_calls", None) or []
    return [(entry.id, entry.function.name, entry.function.arguments) for entry in calls]


@pytest.mark.parametrize("frame", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_single_and_multiple_frames_encode_to_the_same_bytes(frame: Frame) -> None:
    one_by_one = chat_stream()
    assert b"".join(one_by_one.encode([event]) for event in frame) == chat_stream().encode(frame)


@pytest.mark.parametrize("frame", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_every_stream_follows_the_chunk_rules(frame: Frame) -> None:
    encoded = chat_stream().encode(frame)
    chunks = chunks_of(encoded)
    assert encoded.endswith(b"data: [DONE]\n\n")
    assert all("system_fingerprint" in data for data in data_of(encoded))
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert [bool(chunk.choices and chunk.choices[0].finish_reason) for chunk in chunks][-2:] == [True, False]
    assert chunks[-2].choices[0].delta.model_dump(exclude_none=True) == {}
    assert chunks[-1].choices == []


def test_answering_model_replaces_the_requested_name() -> None:
    assert whole(CONVERSATIONS["plain text"]).model == "tiny"
    assert whole(CONVERSATIONS["cut by length"]).model == "pool"


def test_usage_is_sent_only_on_request_and_complete() -> None:
    frame = [stopped(text="a"), finished()]
    assert b'"usage"' not in chat_stream(include_usage=False).encode(frame)
    usage = data_of(chat_stream().encode(frame))[-1]["usage"]
    assert usage == {
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_delta_without_content_does_not_start_the_answer() -> None:
    encoder = chat_stream()
    assert encoder.encode([started("tiny"), piece()]) == b""
    assert not encoder.has_content
    assert b'"role":"assistant"' in encoder.encode([piece("a")])
    assert encoder.has_content


def test_each_choice_has_its_own_preamble() -> None:
    frame = [piece("a", index=0), piece("b", index=1), stopped(index=1), piece("c", index=0)]
    chunks = chunks_of(chat_stream(n=2).encode(frame))
    seen = [(chunk.choices[0].index, chunk.choices[0].delta.role, chunk.choices[0].delta.content) for chunk in chunks]
    assert seen == [
        (0, "assistant", ""),
        (0, None, "a"),
        (1, "assistant", ""),
        (1, None, "b"),
        (1, None, None),
        (0, None, "c"),
    ]


def test_call_without_an_id_gets_one() -> None:
    frame = [stopped(tool_calls=[call(name="f", arguments_text="{}")]), finished()]
    assert tool_calls(whole(frame).choices[0].message)[0][0].startswith("call-")
    first = chunks_of(chat_stream().encode(frame))[1].choices[0].delta.tool_calls
    assert first is not None
    assert first[0].id is not None
    assert first[0].id.startswith("call-")


def test_token_without_text_keeps_its_log_probability() -> None:
    half = event_pb2.TokenLogprob(token="\ufffd", logprob=-1.0, raw_bytes=b"\xf0\x9f")
    encoded = chat_stream(logprobs=True).encode([piece("a"), piece(logprobs=[half])])
    last = data_of(encoded)[-1]["choices"][0]
    assert last["delta"] == {"content": ""}
    assert last["logprobs"]["content"][0] == {
        "token": "\ufffd",
        "logprob": -1.0,
        "bytes": [240, 159],
        "top_logprobs": [],
    }


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("frame", [[finished()], [piece("a"), finished()]], ids=["empty", "no finish"])
def test_end_without_a_finish_reason_is_an_error_in_every_format(frame: Frame, n: int) -> None:
    encoders: list[ChatStream | CompletionStream] = [
        chat_stream(n=n),
        CompletionStream(IDENTITY, choice_count=n, include_usage=False, logprobs=False),
    ]
    for encoder in encoders:
        with pytest.raises(WeftError) as caught:
            encoder.encode(frame)
        assert caught.value.reason is Reason.BACKEND_PROTOCOL_ERROR
    answers: list[ChatAnswer | CompletionAnswer] = [
        ChatAnswer(IDENTITY, choice_count=n, logprobs=False),
        CompletionAnswer(IDENTITY, choice_count=n, logprobs=False),
    ]
    for answer in answers:
        answer.add(frame)
        with pytest.raises(WeftError) as caught:
            answer.body()
        assert caught.value.reason is Reason.BACKEND_PROTOCOL_ERROR


def test_whole_answer_discards_an_attempt_without_content() -> None:
    frame = [
        started("one"),
        stopped(),
        started("two"),
        piece("a"),
        stopped(),
        finished(),
    ]
    answer = whole(frame)
    assert (answer.model, answer.choices[0].message.content) == ("two", "a")


def test_text_completion_stream_matches_the_whole_response() -> None:
    frame = [started("tiny"), piece("a"), piece("b", reasoning="r"), stopped(), finished()]
    encoder = CompletionStream(IDENTITY, choice_count=1, include_usage=True, logprobs=False)
    chunks = data_of(encoder.encode(frame))
    answer = CompletionAnswer(IDENTITY, choice_count=1, logprobs=False)
    answer.add(frame)
    document = json.loads(answer.body())
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == document["choices"][0]["text"] == "arb"
    assert chunks[-2]["choices"][0]["finish_reason"] == document["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["usage"] == document["usage"]
    assert {chunk["object"] for chunk in chunks} == {document["object"]} == {"text_completion"}


def test_failure_is_an_event_with_the_error_envelope() -> None:
    encoded = chat_stream().failure(WeftError(Reason.SERVER_DIED, "the engine died"))
    assert encoded.endswith(b"\n\n")
    assert data_of(encoded)[0]["error"]["code"] == "server_died"


def test_comment_cannot_inject_an_event() -> None:
    queued = event_pb2.Queued(position=1, reason="x\n\ndata: {}\r\rdata: y" + "z" * 500)
    comment = comment_of(Event(queued=queued), "queued")
    assert comment.startswith(b": queued position=1 reason=x data: {}")
    assert comment.count(b"\n") == 2
    assert b"\r" not in comment
    assert len(comment) < 300


def test_comment_shows_short_waits_in_tenths_of_a_second() -> None:
    queued = event_pb2.Queued(position=2, reason="all slots are busy")
    queued.eta.FromMilliseconds(1_300)
    comment = comment_of(Event(queued=queued), "queued")
    assert comment == b": queued position=2 eta_seconds=1.3 reason=all slots are busy\n\n"


def test_events_unsupported_by_this_api_are_skipped() -> None:
    assert chat_stream().encode([Event()]) == b""


JOINED = piece("ab😀", piece_lengths=[1, 2])
OTHER_JOINED = piece("cd", index=1, piece_lengths=[1, 1])
JOINED_ANSWERS: dict[str, Frame] = {
    "after the first content": [piece("a"), JOINED, piece("b"), JOINED],
    "as the first content": [JOINED, JOINED],
    "of two choices": [piece("a"), OTHER_JOINED, JOINED, OTHER_JOINED],
    "between other content": [
        piece(reasoning="r"),
        JOINED,
        calling(call(id="c", name="f", arguments_text="{}")),
        JOINED,
    ],
}


STREAMS: dict[str, Callable[[], StreamEncoder]] = {
    "chat": partial(ChatStream, IDENTITY, choice_count=2, logprobs=False),
    "chat with log probabilities": partial(ChatStream, IDENTITY, choice_count=2, logprobs=True),
    "completion": partial(CompletionStream, IDENTITY, choice_count=2, logprobs=False),
    "completion with log probabilities": partial(CompletionStream, IDENTITY, choice_count=2, logprobs=True),
    "message": partial(MessagesStream, IDENTITY),
    "chat of Ollama": partial(OllamaStream, IDENTITY, Shape.MESSAGE, logprobs=False),
    "completion of Ollama": partial(OllamaStream, IDENTITY, Shape.RESPONSE, logprobs=True),
}


@pytest.mark.parametrize("frame", JOINED_ANSWERS.values(), ids=JOINED_ANSWERS.keys())
@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS.keys())
def test_joined_texts_are_encoded_like_separate_ones(stream: Callable[[], StreamEncoder], frame: Frame) -> None:
    assert stream().reads_joined_texts
    ends = [stopped(), stopped(index=1), finished()]
    events = [started("tiny"), *frame, *ends]
    joined, single = (stream().encode(sent) for sent in (events, apart(events)))
    assert joined == single


def test_stream_without_joined_text_support_would_merge_them() -> None:
    """The negative control: such a stream must not ask for them."""
    assert not StreamEncoder.reads_joined_texts
    joined, single = (chat_stream().encode([piece("a"), *events]) for events in ([piece("ab😀")], apart([JOINED])))
    assert joined != single


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS.keys())
def test_line_separators_of_a_model_break_no_line_of_a_stream(stream: Callable[[], StreamEncoder]) -> None:
    events = [started("tiny"), piece("a\u2028b"), piece("c\u2029d\x85e"), stopped(), stopped(index=1), finished()]
    encoded = stream().encode(events)
    assert encoded.decode().splitlines() == [line.decode() for line in encoded.split(b"\n")][: encoded.count(b"\n")]
    assert rb"a\u2028b" in encoded
