"""The order of chunks in an engine's answer, and how they are sent on."""

import pytest
from kit.failures import expect_failure, fails

from runner_svc.policy.answer_state import (
    AnswerState,
    Finish,
    require_assistant,
)
from runner_svc.servicers.inference import MAX_HELD_EVENTS, AnswerWriter
from weft.api.common.v1 import event_pb2, warning_pb2
from weft.dispatch.frames import Frame
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


def _answer(
    *pieces: tuple[int, str, str | None], choices: int = 1, figures: bool = True, done: bool = False
) -> AnswerState:
    """Returns an answer that was read to its end; chunks are (choice, text, finish reason)."""
    state = AnswerState(choices)
    for index, text, word in pieces:
        state.take(index, word, has_content=bool(text), has_call=text == "call")
    state.close(has_figures=figures, is_done=done)
    return state


def _fault(*pieces: tuple[int, str, str | None], choices: int = 1, figures: bool = True) -> WeftError:
    with pytest.raises(WeftError) as refused:
        _answer(*pieces, choices=choices, figures=figures)
    return refused.value


FINISH_WORDS = {
    Finish.STOP: "stop end complete completed finished end_turn pause_turn stop_sequence eos eos_token stop_token "
    "stop_string",
    Finish.LENGTH: "length max_tokens max_output_tokens max_new_tokens truncated model_length "
    "model_context_window_exceeded error_limit max_length token_limit time_limit not_finished repetition",
    Finish.TOOL_CALLS: "tool_calls tool_call tool_use function_call function_calls",
    Finish.CONTENT_FILTER: "content_filter content_filtered refusal moderation sensitive error_toxic "
    "guardrail_intervened safety recitation blocklist prohibited_content spii language model_armor",
}
FAILURE_WORDS = [
    "error",
    "abort",
    "aborted",
    "cancel",
    "canceled",
    "cancelled",
    "failed",
    "failure",
    "timeout",
    "insufficient_system_resource",
    "network_error",
    "server_error",
    "internal_error",
    "malformed_function_call",
    "malformed_model_output",
    "malformed_tool_use",
    "malformed_response",
    "unexpected_tool_call",
    "too_many_tool_calls",
    "missing_thought_signature",
]


@pytest.mark.parametrize(
    ("word", "finish"), [(word, finish) for finish, words in FINISH_WORDS.items() for word in words.split()]
)
def test_every_known_finish_reason_ends_a_choice(word: str, finish: Finish) -> None:
    text = "call" if finish is Finish.TOOL_CALLS else "a"
    assert _answer((0, text, None), (0, "", word)).ends == {0: finish}
    assert _answer((0, text, None), (0, "", f" {word.upper()}")).ends == {0: finish}


def test_choice_with_calls_that_ends_with_stop_ends_with_tool_calls() -> None:
    assert _answer((0, "call", "stop")).ends == {0: Finish.TOOL_CALLS}
    assert _answer((0, "call", "length")).ends == {0: Finish.LENGTH}


@pytest.mark.parametrize("word", [*FAILURE_WORDS, "ABORT"])
def test_failure_finish_reason_is_a_backend_error_with_that_word(word: str) -> None:
    expect_failure(_fault((0, "a", None), (0, "", word)), Reason.BACKEND_ERROR, repr(word))


@pytest.mark.parametrize(
    ("word", "finish"),
    [
        ("max-tokens", Finish.LENGTH),
        ("maxTokens", Finish.LENGTH),
        ("FinishReason.MAX_TOKENS", Finish.LENGTH),
        ("context_window_full", Finish.LENGTH),
        ("ERROR_LIMIT", Finish.LENGTH),
        ("image_safety", Finish.CONTENT_FILTER),
        ("content-filter", Finish.CONTENT_FILTER),
        ("content_policy_violation", Finish.CONTENT_FILTER),
    ],
)
def test_word_of_an_unknown_service_is_read_by_its_stem(word: str, finish: Finish) -> None:
    state = _answer((0, "a", None), (0, "", word))
    assert (state.ends, state.doubts) == ({0: finish}, {})


@pytest.mark.parametrize("word", ["upstream_error", "request-timed-out", "rate_limit_exceeded"])
def test_word_of_an_unknown_failure_is_a_backend_error(word: str) -> None:
    expect_failure(_fault((0, "a", None), (0, "", word)), Reason.BACKEND_ERROR, repr(word))


def test_finish_reason_that_may_quote_a_prompt_is_not_logged() -> None:
    fault = _fault((0, "a", None), (0, "", "error my secret"))
    assert "my secret" in fault.message
    assert fault.log_message == "the engine ended choice 0 with an error"


@pytest.mark.parametrize("word", ["done", "STOP!", "\ud800", "x" * 10_000])
def test_unknown_finish_reason_marks_the_end_as_uncertain(word: str) -> None:
    state = _answer((0, "a", word), (0, "b", None))
    assert state.ends == {0: Finish.STOP}
    assert state.doubts == {0: word}


def test_end_without_a_finish_reason_is_uncertain_after_done_and_truncated_before() -> None:
    state = _answer((0, "a", None), done=True)
    assert (state.ends, state.doubts) == ({0: Finish.STOP}, {0: ""})
    assert _answer((0, "call", None), done=True).ends == {0: Finish.TOOL_CALLS}
    assert "0 of 1 choices finished" in _fault((0, "a", None)).message
    with pytest.raises(WeftError):
        _answer((0, "a", "stop"), choices=2, done=True)


@pytest.mark.parametrize("word", [None, "", "null"])
def test_empty_finish_reason_on_every_chunk_is_not_the_end(word: str | None) -> None:
    assert "0 of 1 choices finished" in _fault((0, "a", word), (0, "b", word)).message


def test_ended_choice_accepts_no_more_content() -> None:
    assert "continued choice 0" in _fault((0, "a", "stop"), (0, "b", None)).message
    assert "continued choice 1" in _fault((1, "a", "stop"), (0, "b", None), (1, "c", None), choices=2).message


def test_truncating_finish_reason_takes_precedence() -> None:
    assert _answer((0, "a", "stop"), (0, "", "length")).ends == {0: Finish.LENGTH}
    assert _answer((0, "a", "length"), (0, "", "stop")).ends == {0: Finish.LENGTH}


def test_repeated_finish_reason_is_ignored() -> None:
    assert _answer((0, "a", "stop"), (0, "", "stop"), (0, "", "")).ends == {0: Finish.STOP}


@pytest.mark.parametrize("index", [1, 2**60])
def test_unrequested_choice_is_a_protocol_error(index: int) -> None:
    assert _fault((index, "a", None)).message == f"there is no choice {index}"


def test_every_choice_must_finish() -> None:
    assert "1 of 2 choices finished" in _fault((0, "a", "stop"), (1, "b", None), choices=2).message
    assert _answer((0, "a", "stop"), (1, "b", "length"), choices=2).is_complete


def test_tool_call_finish_reason_requires_a_tool_call() -> None:
    assert "for a tool call and sent none" in _fault((0, "text", "tool_calls")).message
    assert "for a tool call" in _fault((0, "call", "tool_calls"), (1, "a", "tool_calls"), choices=2).message


def test_empty_answer_is_valid_only_with_usage_figures_or_a_truncating_reason() -> None:
    assert "empty answer" in _fault((0, "", "stop"), figures=False).message
    assert _answer((0, "", "stop"), figures=True).is_complete, "the model ended at once"
    assert _answer((0, "", "content_filter"), figures=False).is_complete
    assert _answer((0, "", "length"), figures=False).is_complete


@pytest.mark.parametrize("role", [None, "", "assistant", "model"])
def test_assistant_chunk_is_accepted(role: str | None) -> None:
    require_assistant(role)


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_chunk_of_another_role_is_a_protocol_error(role: str) -> None:
    with fails(Reason.BACKEND_PROTOCOL_ERROR):
        require_assistant(role)


STARTED = event_pb2.InferenceEvent(started=event_pb2.Started(runner="r"))
PROGRESS = event_pb2.InferenceEvent(progress=event_pb2.Progress(prompt_tokens=9))
WARNING = event_pb2.InferenceEvent(warning=warning_pb2.Warning(message="w"))
CALL = event_pb2.InferenceEvent(tool_call=event_pb2.ToolCall(id="c"))
FINISHED = event_pb2.InferenceEvent(finished=event_pb2.Finished())


def _text(text: str) -> event_pb2.InferenceEvent:
    return event_pb2.InferenceEvent(delta=event_pb2.Delta(text=text))


def _sent(frames: list[Frame], *, whole: bool) -> list[list[str]]:
    writer = AnswerWriter(STARTED, whole=whole)
    messages = filter(None, map(writer.message_of, frames))
    return [[event.delta.text or str(event.WhichOneof("event")) for event in one.events] for one in messages]


ANSWER: list[Frame] = [[_text("a")], [_text("b")], [_text("c"), _text("d")], [FINISHED]]


def test_streamed_answer_is_sent_as_it_arrives() -> None:
    assert _sent(ANSWER, whole=False) == [["started", "a"], ["b"], ["c", "d"], ["finished"]]


def test_whole_answer_sends_its_first_content_immediately_and_the_rest_at_the_end() -> None:
    assert _sent(ANSWER[:-1], whole=True) == [["started", "a"]]
    assert _sent(ANSWER, whole=True) == [["started", "a"], ["b", "c", "d", "finished"]]


@pytest.mark.parametrize("event", [PROGRESS, WARNING, CALL])
def test_other_events_of_a_whole_answer_are_sent_immediately_in_order(event: event_pb2.InferenceEvent) -> None:
    kind = str(event.WhichOneof("event"))
    assert _sent([[event]], whole=True) == [["started", kind]]
    frames: list[Frame] = [[_text("a")], [_text("b")], [event]]
    assert _sent(frames, whole=True) == [["started", "a"], ["b", kind]]


def test_whole_answer_buffers_a_bounded_number_of_chunks() -> None:
    frames: list[Frame] = [[_text("a")], *([_text("x")] for _ in range(MAX_HELD_EVENTS))]
    assert [len(message) for message in _sent(frames, whole=True)] == [2, MAX_HELD_EVENTS]
