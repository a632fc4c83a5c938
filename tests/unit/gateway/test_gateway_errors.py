import json
import math
from typing import get_args

import pytest
from anthropic.types.shared import ErrorType

from gateway.errors import (
    DetailedError,
    Dialect,
    EdgeError,
    dialect_of,
    envelope,
    error_headers,
    http_status,
    retry_after_seconds,
    retry_headers,
)
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import TRAITS, Reason
from weft.kernel.values.unknown_names import unknown_target

# https://platform.openai.com/docs/guides/error-codes: what a client of OpenAI's API looks for.
OPENAI_CODES = {
    Reason.UNAUTHENTICATED: "invalid_api_key",
    Reason.MODEL_NOT_FOUND: "model_not_found",
    Reason.CONTEXT_LENGTH_EXCEEDED: "context_length_exceeded",
    Reason.RATE_LIMIT_EXCEEDED: "rate_limit_exceeded",
}
# Sent with 413, documented, and missing in Anthropic's library.
UNDOCUMENTED_TYPES = ("request_too_large",)


@pytest.mark.parametrize(("reason", "code"), OPENAI_CODES.items())
@pytest.mark.parametrize("dialect", Dialect)
def test_openai_error_codes_are_present_in_every_dialect(reason: Reason, code: str, dialect: Dialect) -> None:
    document = json.loads(envelope(WeftError(reason, "x"), dialect=dialect))
    assert (document if dialect is Dialect.OLLAMA else document["error"])["code"] == code


@pytest.mark.parametrize("dialect", Dialect)
def test_close_names_of_an_unknown_model_are_a_list_beside_the_message(dialect: Dialect) -> None:
    document = json.loads(envelope(unknown_target("qwn", ["qwen", "other"]), dialect=dialect))
    assert (document if dialect is Dialect.OLLAMA else document["error"])["close_names"] == ["qwen"]


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_an_envelope_status_and_correct_retry_headers(reason: Reason) -> None:
    error = WeftError(reason, "what happened")
    fields = json.loads(envelope(error))["error"]
    headers = dict(retry_headers(error))
    status, retryable = http_status(error), TRAITS[reason].retryable
    assert set(fields) == {"message", "type", "param", "code"}
    assert fields["code"] == OPENAI_CODES.get(reason, reason.name.lower())
    assert fields["param"] is None
    assert status == TRAITS[reason].http_status
    assert 400 <= status < 600
    assert (b"retry-after" in headers) == (status in {429, 503})
    if status in {429, 503}:
        assert 1 <= int(headers[b"retry-after"]) <= 60
        assert headers[b"x-should-retry"] == (b"true" if retryable else b"false")
    elif status >= 500 and not retryable:
        assert headers == {b"x-should-retry": b"false"}
    if not retryable:
        # Clients retry some statuses by default; `x-should-retry` must stop them.
        assert (status not in {408, 409, 429} and status < 500) or headers[b"x-should-retry"] == b"false"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (Reason.INVALID_ARGUMENT, "invalid_request_error"),
        (Reason.MODEL_NOT_FOUND, "invalid_request_error"),
        (Reason.REQUEST_TOO_LARGE, "invalid_request_error"),
        (Reason.UNAUTHENTICATED, "authentication_error"),
        (Reason.PERMISSION_DENIED, "permission_error"),
        (Reason.RATE_LIMIT_EXCEEDED, "rate_limit_error"),
        (Reason.QUEUE_FULL, "server_error"),
        (Reason.INTERNAL, "server_error"),
    ],
)
def test_error_type_follows_the_status(reason: Reason, kind: str) -> None:
    assert json.loads(envelope(WeftError(reason, "x")))["error"]["type"] == kind


def test_field_error_names_its_field() -> None:
    fields = json.loads(envelope(invalid_field("messages[2].role", "is unknown")))["error"]
    assert (fields["param"], fields["message"]) == ("messages[2].role", "messages[2].role: is unknown")


@pytest.mark.parametrize("reason", [Reason.INTERNAL, Reason.UNSPECIFIED])
def test_internal_error_hides_its_message(reason: Reason) -> None:
    assert b"/etc" not in envelope(WeftError(reason, "cannot open /etc/weft/key"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, 1), (0, 1), (-5, 1), (0.2, 1), (1.5, 2), (60, 60), (3600, 60), (math.inf, 60), (math.nan, 60)],
)
def test_retry_after_is_a_small_integer(given: float | None, expected: int) -> None:
    assert retry_after_seconds(WeftError(Reason.QUEUE_FULL, "x", retry_after_seconds=given)) == expected


def test_gateway_error_may_override_the_status_and_add_headers() -> None:
    error = EdgeError(408, Reason.DEADLINE_EXCEEDED, "late", headers=((b"allow", b"GET"),))
    headers = error_headers(error, b"12345")
    assert http_status(error) == 408
    assert (b"allow", b"GET") in headers
    assert (b"content-length", b"5") in headers


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_an_anthropic_envelope(reason: Reason) -> None:
    document = json.loads(envelope(WeftError(reason, "what happened"), "req-1", Dialect.ANTHROPIC))
    assert set(document) == {"type", "error", "request_id"}
    assert (document["type"], document["request_id"]) == ("error", "req-1")
    assert set(document["error"]) == {"type", "message", "code"}
    assert document["error"]["code"] == OPENAI_CODES.get(reason, reason.name.lower())
    assert document["error"]["type"] in get_args(ErrorType) or document["error"]["type"] in UNDOCUMENTED_TYPES


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (Reason.INVALID_ARGUMENT, "invalid_request_error"),
        (Reason.ALREADY_EXISTS, "invalid_request_error"),
        (Reason.UNAUTHENTICATED, "authentication_error"),
        (Reason.PERMISSION_DENIED, "permission_error"),
        (Reason.MODEL_NOT_FOUND, "not_found_error"),
        (Reason.REQUEST_TOO_LARGE, "request_too_large"),
        (Reason.RATE_LIMIT_EXCEEDED, "rate_limit_error"),
        (Reason.QUEUE_FULL, "overloaded_error"),
        (Reason.DEADLINE_EXCEEDED, "timeout_error"),
        (Reason.UNSUPPORTED_OPERATION, "api_error"),
        (Reason.WORKER_LOST, "api_error"),
        (Reason.INTERNAL, "api_error"),
    ],
)
def test_anthropic_error_type_follows_the_status(reason: Reason, kind: str) -> None:
    assert json.loads(envelope(WeftError(reason, "x"), dialect=Dialect.ANTHROPIC))["error"]["type"] == kind


def test_prompt_too_long_error_uses_the_text_that_clients_match() -> None:
    error = WeftError(Reason.CONTEXT_LENGTH_EXCEEDED, "the prompt has 9 tokens; the context of this model has 8")
    told = json.loads(envelope(error, dialect=Dialect.ANTHROPIC))["error"]["message"]
    assert told == "prompt is too long: the prompt has 9 tokens; the context of this model has 8"
    assert json.loads(envelope(error))["error"]["message"] == error.message


def test_limit_of_the_answer_is_not_called_a_prompt_that_is_too_long() -> None:
    """Claude Code shortened a conversation that fits, again and again."""
    words = "3000 tokens of input and 32000 of the answer exceed the context"
    error = WeftError(Reason.CONTEXT_LENGTH_EXCEEDED, words, metadata={"field": "max_tokens"})
    told = json.loads(envelope(error, dialect=Dialect.ANTHROPIC))["error"]
    assert (told["message"], told["param"]) == (words, "max_tokens")


def test_figures_fields_and_codes_are_present_in_both_dialects() -> None:
    field = json.loads(envelope(invalid_field("max_tokens", "is missing"), dialect=Dialect.ANTHROPIC))["error"]
    assert field["param"] == "max_tokens"
    full = WeftError(Reason.QUEUE_FULL, "full", metadata={"queueDepth": "3"})
    detailed = DetailedError(Reason.NOT_FOUND, "gone", details={"taskId": "t1"}, code="task_gone")
    beside = json.loads(envelope(full, dialect=Dialect.OLLAMA))
    assert (beside["error"], beside["queueDepth"], beside["code"]) == ("full", 3, "queue_full")
    for dialect in (Dialect.OPENAI, Dialect.ANTHROPIC):
        assert json.loads(envelope(full, dialect=dialect))["error"]["queueDepth"] == 3
        told = json.loads(envelope(detailed, dialect=dialect))["error"]
        assert (told["taskId"], told["code"]) == ("t1", "task_gone")


@pytest.mark.parametrize("reason", [Reason.INTERNAL, Reason.UNSPECIFIED])
def test_internal_error_hides_its_message_in_the_anthropic_dialect(reason: Reason) -> None:
    assert b"/etc" not in envelope(WeftError(reason, "cannot open /etc/weft/key"), dialect=Dialect.ANTHROPIC)


@pytest.mark.parametrize(
    ("path", "names_a_version", "dialect"),
    [
        ("/v1/messages", False, Dialect.ANTHROPIC),
        ("/v1/messages/", False, Dialect.ANTHROPIC),
        ("/v1/messages/count_tokens", True, Dialect.ANTHROPIC),
        ("/v1/messagesx", True, Dialect.OPENAI),
        ("/v1/models", True, Dialect.ANTHROPIC),
        ("/v1/models", False, Dialect.OPENAI),
        ("/v1/models/x/y", True, Dialect.ANTHROPIC),
        ("/v1/chat/completions", True, Dialect.OPENAI),
        ("/", True, Dialect.OPENAI),
    ],
)
def test_path_selects_the_error_dialect(path: str, names_a_version: bool, dialect: Dialect) -> None:
    assert dialect_of(path, {b"anthropic-version": b"x"} if names_a_version else {}) is dialect


def test_field_renamed_by_runners_is_reported_under_its_http_name() -> None:
    error = json.loads(envelope(FieldError("choice_count", "must be 1")))["error"]
    assert (error["param"], error["message"]) == ("n", "n: must be 1")
