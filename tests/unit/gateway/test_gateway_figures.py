"""Refusals for lack of capacity have their figures in the body, whatever their origin."""

import json

import pytest

from gateway.errors import FIGURES, envelope, retry_headers
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


def error_of(error: WeftError) -> dict[str, object]:
    found = json.loads(envelope(error))["error"]
    assert isinstance(found, dict)
    return found


def test_full_queue_error_has_the_queue_length() -> None:
    error = WeftError(
        Reason.QUEUE_FULL,
        "Queue depth 16/16, retry in 5 seconds",
        metadata={"model": "qwen", "queueDepth": "16", "maxDepth": "16", "avgWaitMs": "2000.4"},
        retry_after_seconds=5,
    )
    assert error_of(error) == {
        "message": "Queue depth 16/16, retry in 5 seconds",
        "type": "server_error",
        "param": None,
        "code": "queue_full",
        "queueDepth": 16,
        "maxDepth": 16,
        "avgWaitMs": 2000,
    }
    assert dict(retry_headers(error)) == {b"retry-after": b"5", b"x-should-retry": b"true"}


def test_rate_limit_error_has_the_limit_and_its_reset() -> None:
    metadata = {"tenant": "a", "limit": "100", "remaining": "0", "resetAt": "1745880060"}
    error = WeftError(Reason.RATE_LIMIT_EXCEEDED, "x", metadata=metadata, retry_after_seconds=29.2)
    found = error_of(error)
    assert (found["limit"], found["remaining"], found["resetAt"]) == (100, 0, 1745880060)
    assert (found["type"], found["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "tenant" not in found
    assert dict(retry_headers(error)) == {b"retry-after": b"30", b"x-should-retry": b"true"}


def test_unreachable_deadline_error_has_the_estimate() -> None:
    error = WeftError(Reason.DEADLINE_UNREACHABLE, "it would take 52 s", metadata={"estimate_seconds": "52.1"})
    assert error_of(error)["estimateSeconds"] == 52.1


@pytest.mark.parametrize("text", ["", "many", "nan", "inf", "-inf"])
def test_non_numeric_values_are_omitted(text: str) -> None:
    assert "queueDepth" not in error_of(WeftError(Reason.QUEUE_FULL, "x", metadata={"queueDepth": text}))


@pytest.mark.parametrize("reason", [Reason.INVALID_ARGUMENT, Reason.INTERNAL, Reason.BACKEND_ERROR])
def test_other_errors_have_no_figures_for_any_metadata(reason: Reason) -> None:
    error = WeftError(reason, "x", metadata=dict.fromkeys(FIGURES, "1"))
    assert set(error_of(error)) == {"message", "type", "param", "code"}


def test_request_id_is_beside_the_error_if_known() -> None:
    error = WeftError(Reason.QUEUE_FULL, "x")
    assert json.loads(envelope(error, "req-1"))["request_id"] == "req-1"
    assert set(json.loads(envelope(error))) == {"error"}
