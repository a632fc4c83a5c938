"""What OpenAI-compatible servers say when they refuse or fail."""

import msgspec

from runner_svc.backends.engine_json import JSON_FAULTS

MAX_ERROR_CHARS = 500
"""Of an error's words; the rest says no more."""
CONTEXT_LENGTH_CODE = "context_length_exceeded"
"""What OpenAI and those who follow it call it; their type is that of any wrong request."""
UNPAID_CODES = frozenset({"insufficient_quota", "billing_hard_limit_reached"})
"""Words of providers that answer 429 when nothing is left to pay with: waiting does not help."""
TELLING_CODES = UNPAID_CODES | {CONTEXT_LENGTH_CODE}
"""Codes that say more than the type beside them."""


class ErrorBody(msgspec.Struct):
    """An error as it stands in an answer."""

    message: str | None = None
    type: str | None = None
    code: str | int | None = None


class _ErrorEnvelope(msgspec.Struct):
    error: ErrorBody | str | None = None
    message: str = ""
    type: object = None
    """Of an error without an envelope, as SGLang and earlier versions of vLLM send it."""
    error_type: object = None
    """text-generation-inference's, beside a text under `error`."""
    detail: msgspec.Raw = msgspec.Raw()
    """FastAPI's: a text, or a list of what is wrong where."""


def error_words(error: ErrorBody | str) -> str:
    """What an error says, cut to MAX_ERROR_CHARS."""
    return (error if isinstance(error, str) else error.message or "")[:MAX_ERROR_CHARS]


def error_fields(body: bytes) -> tuple[str, str]:
    """Message (cut to MAX_ERROR_CHARS) and kind of a backend's error; the raw text where it is not JSON.

    The kind is its type, or its code where that is one of TELLING_CODES.
    """
    try:
        envelope = msgspec.json.decode(body, type=_ErrorEnvelope)
    except JSON_FAULTS:
        return body.decode("utf-8", "replace")[:MAX_ERROR_CHARS], ""
    if isinstance(envelope.error, ErrorBody):
        code = envelope.error.code
        kind = str(code) if code in TELLING_CODES else envelope.error.type or ""
        return error_words(envelope.error), kind
    words = envelope.error or envelope.message or bytes(envelope.detail).decode("utf-8", "replace").strip('"')
    return error_words(words), str(envelope.type or envelope.error_type or "")
