"""Errors of engines about the content of a request, with their messages and statuses."""

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from kit.presence import present

from runner_svc.openai_upstream.answers import require_content_type
from runner_svc.openai_upstream.errors import (
    MAX_ERROR_CHARS,
    ErrorBody,
    malformed,
    provider_refusal,
    refusal,
    stated_answer,
    stated_error,
)
from runner_svc.openai_upstream.openai_stream import StreamReader
from runner_svc.policy.engine_failures import without_tracebacks
from weft.kernel.errors.error_tree import LASTING, WeftError, with_field
from weft.kernel.errors.failover import FailureKind, classify
from weft.kernel.errors.reasons import Reason

if TYPE_CHECKING:
    from runner_svc.engine_http.answer import Answer

LLAMA_IMAGE = "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj"
REFUSALS = [
    (500, {"error": {"code": 500, "message": LLAMA_IMAGE, "type": "server_error"}}),
    (400, {"error": {"code": 400, "message": LLAMA_IMAGE, "type": "invalid_request_error"}}),
    (415, {"detail": "Unsupported media"}),
    (422, {"detail": [{"loc": ["body", "messages"], "msg": "Field required"}]}),
    (500, {"error": {"message": "audio input is not supported - hint: you may need to provide the mmproj"}}),
    (500, {"error": {"message": "Failed to load image or audio file", "type": "server_error"}}),
    (500, {"error": {"message": "failed to process inputs: this model is missing data required for image input"}}),
    (500, {"error": "model does not support images. Please use a model that does."}),
    (500, {"error": {"message": "llama3 does not support tools", "type": "api_error"}}),
    (500, {"error": {"message": "/models/llama is not a multimodal model"}}),
    (500, {"object": "error", "message": "At most 0 image(s) may be provided in one prompt.", "code": 500}),
    (500, {"error": {"code": 500, "message": "Error: Jinja Exception: Conversation roles must alternate user/a..."}}),
    (500, {"error": {"code": 500, "message": "Conversation roles must alternate user/assistant at row 19, column 27"}}),
    (500, {"error": {"code": 500, "message": "tools param requires --jinja flag"}}),
    (500, {"error": {"code": 500, "message": "Failed to parse grammar", "type": "server_error"}}),
    (500, {"error": {"code": 500, "message": "JSON schema conversion failed: unrecognized schema"}}),
    (500, {"error": {"code": 500, "message": "unsupported content[].type"}}),
    (422, {"error": "Template error: unknown filter", "error_type": "template_error"}),
]
TOO_LONG = [
    (400, {"error": {"code": 400, "message": "request (9 tokens) exceeds the available context size (8 tokens)"}}),
    (500, {"error": {"code": 500, "message": "the request exceeds the available context size. try increasing it"}}),
    (500, {"error": {"message": "input (600 tokens) is too large to process. increase the physical batch size (512)"}}),
    (400, {"object": "error", "message": "This model's maximum context length is 4096 tokens.", "type": "BadRequest"}),
    (400, {"error": {"message": "Requested tokens (600) exceed context window of 512", "code": None}}),
    (422, {"error": "`inputs` tokens + `max_new_tokens` must be <= 4096", "error_type": "validation"}),
    (400, {"error": {"message": "the input length exceeds the context length", "type": "api_error"}}),
]
FAILURES = [
    (500, {"error": {"code": 500, "message": "decode failed", "type": "server_error"}}),
    (500, {"error": {"message": "CUDA error: an illegal memory access was encountered"}}),
    (500, {"error": {"message": "llama runner process has terminated: exit status 2"}}),
    (500, {"error": "model runner has unexpectedly stopped"}),
    (500, {}),
    (502, "<html><title>Bad Gateway</title></html>"),
    (500, "Internal Server Error"),
]


TRACEBACK = """\
Traceback (most recent call last):
  File "/opt/engine/server.py", line 147, in generate
    return text.split("\\n")
           ^^^^^^^^^^^^^^^^
"""


def _body(said: Any) -> bytes:
    return said.encode() if isinstance(said, str) else json.dumps(said).encode()


@pytest.mark.parametrize(("status", "said"), REFUSALS)
def test_content_refusal_belongs_to_the_request_and_does_not_penalize_a_replica(status: int, said: Any) -> None:
    for explain in (refusal, provider_refusal):
        error = explain(status, _body(said), {})
        assert error.reason is Reason.BACKEND_REJECTED
        assert error.traits.http_status == 400
        assert classify(error.reason) is FailureKind.FINAL
        assert error.message.startswith(f"the engine answered {status}: ")


@pytest.mark.parametrize(("status", "said"), TOO_LONG)
def test_prompt_too_long_is_recognized_in_any_engine_wording(status: int, said: Any) -> None:
    error = refusal(status, _body(said), {})
    assert error.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert classify(error.reason) is FailureKind.FINAL


@pytest.mark.parametrize(("status", "said"), FAILURES)
def test_engine_failure_stays_an_engine_failure(status: int, said: Any) -> None:
    error = refusal(status, _body(said), {})
    assert error.reason is Reason.BACKEND_ERROR
    assert classify(error.reason) is FailureKind.BROKE


def test_engine_message_is_in_the_refusal_and_bounded() -> None:
    assert LLAMA_IMAGE in refusal(500, _body(REFUSALS[0][1]), {}).message
    long = refusal(422, _body({"detail": "x" * 10_000}), {}).message
    assert len(long) < MAX_ERROR_CHARS + 50
    assert "Field required" in refusal(422, _body(REFUSALS[3][1]), {}).message


@pytest.mark.parametrize("name", ["error", "message", "detail"])
def test_traceback_in_an_engine_answer_is_reduced_to_its_exception(name: str) -> None:
    """The caller got it whole, cut before the exception if it was long."""
    frames = '  File "/opt/engine/server.py", line 147, in generate\n    return self.model(tokens)\n' * 20
    said = f"Traceback (most recent call last):\n{frames}RuntimeError: no such layer\n"
    for body in (_body({name: said}), _body(said)):
        assert refusal(500, body, {}).message == "the engine answered 500: RuntimeError: no such layer"
    assert (
        _in_stream({"error": {"message": said, "code": 500}}).message
        == "the engine reported: RuntimeError: no such layer"
    )


@pytest.mark.parametrize("where", ["before", "traceback", "list", "repr"])
def test_message_beside_a_traceback_lost_its_text_and_its_reason(where: str) -> None:
    words = "prompt is too long: maximum context length is 8 tokens"
    said = {
        "before": {"error": {"message": f"{words} {TRACEBACK}ValueError: bad"}},
        "traceback": {"detail": {"error": words, "traceback": f"{TRACEBACK}ValueError: bad"}},
        "list": {"detail": [{"traceback": f"{TRACEBACK}ValueError: bad"}, {"msg": words}]},
        "repr": repr(f"{words} {TRACEBACK}ValueError: bad"),
    }[where]
    error = refusal(400, _body(said), {})
    assert error.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert words in error.message
    assert "ValueError: bad" in error.message
    assert "Traceback" not in error.message
    assert "server.py" not in error.message


def test_traceback_without_its_exception_left_an_empty_error() -> None:
    """With status 200, it even counted as an answer."""
    body = _body({"error": {"message": TRACEBACK}})
    stated = present(stated_answer(body))
    assert stated.reason is Reason.BACKEND_ERROR
    assert stated.message == "the engine reported: a Python exception without a message"
    assert refusal(500, body, {}).message == "the engine answered 500: a Python exception without a message"


def test_length_reported_only_in_a_traceback_is_recognized() -> None:
    said = f"{TRACEBACK}    raise ValueError('prompt is too long')\n"
    assert refusal(400, _body(said), {}).reason is Reason.CONTEXT_LENGTH_EXCEEDED


def test_template_error_that_names_a_line_lost_its_cause() -> None:
    said = 'Error rendering template:\n  File "t.jinja", line 3\n    {{ x }}\n  undefined x'
    assert refusal(400, _body(said), {}).message == f"the engine answered 400: {said}"


def test_frames_at_the_start_of_an_answer_are_removed() -> None:
    said = TRACEBACK.partition("\n")[2]
    assert refusal(500, _body(f"{said}ValueError: bad"), {}).message == "the engine answered 500: ValueError: bad"


def _in_stream(*payloads: Any) -> WeftError:
    with pytest.raises(WeftError) as failed:
        StreamReader(1, 1).read([json.dumps(payload).encode() for payload in payloads])
    return failed.value


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"message": LLAMA_IMAGE, "code": 500}, Reason.BACKEND_REJECTED),
        ({"message": "no such role", "type": "BadRequestError", "code": 400}, Reason.BACKEND_REJECTED),
        ({"message": "temperature", "type": "invalid_request_error"}, Reason.BACKEND_REJECTED),
        ({"message": "too long", "code": "context_length_exceeded"}, Reason.CONTEXT_LENGTH_EXCEEDED),
        ({"message": "maximum context length is 10 tokens", "code": 400}, Reason.CONTEXT_LENGTH_EXCEEDED),
        ("roles must alternate", Reason.BACKEND_REJECTED),
        ({"message": "the GPU is gone", "code": 500}, Reason.BACKEND_ERROR),
        ("the GPU is gone", Reason.BACKEND_ERROR),
    ],
)
def test_refusal_inside_a_stream_is_read_like_one_with_a_status(said: Any, reason: Reason) -> None:
    assert _in_stream({"error": said}).reason is reason


def test_error_after_the_answer_started_is_an_engine_failure() -> None:
    began = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
    error = _in_stream(began, {"error": {"message": "exceeds the available context size", "code": 400}})
    assert error.reason is Reason.BACKEND_ERROR


CHAINED_TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/opt/engine/launcher.py", line 147, in main',
    "    server = Server(params)",
    "             ^^^^^^^^^^^^^^",
)


@pytest.mark.parametrize("cut", range(len(CHAINED_TRACEBACK) - 1))
def test_traceback_is_reduced_to_its_exception_even_without_its_start(cut: int) -> None:
    lines = ["loading", *CHAINED_TRACEBACK, "RuntimeError: no server"][cut:]
    kept = without_tracebacks(lines)
    assert kept[-1] == "RuntimeError: no server"
    assert len(kept) <= 2


def test_each_chained_exception_and_surrounding_lines_are_kept() -> None:
    why = "During handling of the above exception, another exception occurred:"
    lines = [
        "a",
        *CHAINED_TRACEBACK,
        "KeyError: 1",
        "",
        why,
        "",
        *CHAINED_TRACEBACK,
        "OSError: 2",
        "  after",
    ]
    assert without_tracebacks(lines) == ["a", "KeyError: 1", "OSError: 2", "  after"]


def test_logger_prefix_of_each_line_is_removed() -> None:
    lines = [f"(Core pid=7) ERROR {line}" for line in (*CHAINED_TRACEBACK, "ValueError: no memory")]
    assert without_tracebacks([*lines, "exiting"]) == ["ValueError: no memory", "exiting"]


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory",
        "CUDA out of memory while encoding: image input is not supported at this size",
        "torch.OutOfMemoryError: tried to allocate 2.00 GiB",
    ],
)
def test_bug_engine_that_says_it_is_out_of_memory_is_reported_so(said: str) -> None:
    body = json.dumps({"error": {"code": 500, "message": said, "type": "server_error"}}).encode()
    assert refusal(500, body, {}).reason is Reason.OUT_OF_MEMORY
    assert stated_error(ErrorBody(message=said), has_begun=True).reason is Reason.OUT_OF_MEMORY


@pytest.mark.parametrize("status", [401, 402, 403, 404, 405])
def test_refused_key_and_wrong_address_of_a_provider_are_lasting(status: int) -> None:
    assert provider_refusal(status, b"no", {}).metadata == {LASTING: "true"}


def test_answer_of_another_format_is_lasting_and_an_overload_is_not() -> None:
    with pytest.raises(WeftError) as raised:
        require_content_type(cast("Answer", SimpleNamespace(content_type="text/html")), "text/event-stream")
    assert LASTING in raised.value.metadata
    assert LASTING in malformed("the engine sent", ValueError("<html>")).metadata
    for status in (500, 502, 503, 429):
        assert LASTING not in refusal(status, b"<html>Bad Gateway</html>", {}).metadata


QUOTES = "prompt of a patient"


@pytest.mark.parametrize("status", [400, 401, 422, 429, 500, 501, 503])
@pytest.mark.parametrize("said", [QUOTES, f"CUDA out of memory: {QUOTES}", f"exceeds the context size: {QUOTES}"])
def test_words_of_an_engine_are_in_the_message_and_not_in_what_is_logged(status: int, said: str) -> None:
    detail = json.dumps({"detail": [{"loc": ["body"], "msg": "a string is required", "input": said}]}).encode()
    error = {"error": {"message": said, "type": "invalid_field"}}
    for found in (
        refusal(status, detail, {}),
        refusal(status, said.encode(), {}),
        refusal(status, json.dumps(error).encode(), {}),
        provider_refusal(400, detail, {}),
        stated_error(ErrorBody(message=said), has_begun=False),
        stated_error(said, has_begun=True),
        malformed("the engine sent", ValueError(said)),
    ):
        assert QUOTES in found.message
        assert QUOTES not in found.log_message
        assert QUOTES not in str(with_field(found, "messages"))


DATE = "Sat, 01 Jan 2000 00:00:00 GMT"


@pytest.mark.parametrize(
    ("headers", "said", "seconds"),
    [
        ({"retry-after": "120"}, "", 120.0),
        ({"retry-after": "1.5"}, "", 1.5),
        ({"retry-after-ms": "250", "retry-after": "1"}, "", 0.25),
        ({"retry-after-ms": "1500.5"}, "", 1.5005),
        ({"retry-after": "Sat, 01 Jan 2000 00:00:42 GMT", "date": DATE}, "", 42.0),
        ({"retry-after": "Sat, 01 Jan 2000 00:00:00 GMT", "date": DATE}, "", 0.0),
        ({"retry-after": "99999999"}, "", 3600.0),
        ({"retry-after": "soon"}, "", None),
        ({"retry-after": "-1"}, "", None),
        ({}, "Rate limit reached. Please try again in 20s.", 20.0),
        ({}, "Please try again in 1m2.5s. Visit our site", 62.5),
        ({}, "Please try again in 120ms.", 0.12),
        ({}, "Please retry in 34.07s.", 34.07),
        ({}, "30 requests per minute are allowed", None),
    ],
)
def test_time_that_a_provider_asks_to_wait_is_read(headers: dict[str, str], said: str, seconds: float | None) -> None:
    error = refusal(429, _body({"error": {"message": said}}), headers)
    assert error.reason is Reason.RATE_LIMIT_EXCEEDED
    assert error.retry_after_seconds == (None if seconds is None else pytest.approx(seconds))
    assert error.message == f"the engine answered 429: {said}"


def test_length_of_an_answer_that_is_not_kept_is_in_characters() -> None:
    assert refusal(500, "Übergröße".encode(), {}).log_message.endswith("(9 characters, not kept)")
