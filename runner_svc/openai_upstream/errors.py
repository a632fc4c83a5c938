"""What the errors and malformed answers of OpenAI-compatible servers mean. Pure.

msgspec refuses numbers that no float holds, NaN, halves of surrogate pairs and control characters by itself. Of a name
that comes twice the last value counts, as with every reader that clients use.
"""

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import TypeVar

import msgspec

from runner_svc.policy.engine_failures import refuses_content, refuses_length
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

JSON_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding may raise: the wrong form or type, text that is not UTF-8, more levels than the interpreter allows."""
_Kind = TypeVar("_Kind")


def read_json(raw: bytes, kind: type[_Kind], what: str) -> _Kind:
    """`raw` as `kind`. Raises BACKEND_PROTOCOL_ERROR with `what` ("the backend's scores are") and why."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except JSON_FAULTS as error:
        raise malformed(f"{what} malformed:", error) from error


def malformed(what: str, error: Exception) -> WeftError:
    """The error for JSON that cannot be read; `what` is the beginning of its message."""
    why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"{what} {why}")


MAX_ERROR_CHARS = 500
"""Of an error's message; the rest is cut off."""
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


MAX_RETRY_AFTER_SECONDS = 3600
BUSY = frozenset({429, 503})
_SECONDS = re.compile(r"[0-9]{1,9}")
_TOO_LONG = frozenset({"exceed_context_size_error", CONTEXT_LENGTH_CODE})
_WRONG_REQUEST = frozenset({"invalid_request_error", "BadRequestError"})
"""Types of errors about the request: OpenAI's and those who follow it; vLLM's and SGLang's."""
_WRONG_CONTENT = frozenset({400, 413, 415, 422})
_UNPAID_STATUS = 402
_REFUSED_KEY = frozenset({401, 403})
_WRONG_PLACE = frozenset({404, 405})


def refusal(status: int, body: bytes, headers: Mapping[str, str]) -> WeftError:
    """Why a server answered with another status than 200."""
    message, kind = error_fields(body)
    text = f"the backend answered {status}: {message}"
    if kind in _TOO_LONG:
        return WeftError(Reason.CONTEXT_LENGTH_EXCEEDED, message)
    if kind == "not_supported_error" or status == 501:
        return WeftError(Reason.UNSUPPORTED_OPERATION, message)
    if status in BUSY:
        return WeftError(Reason.BACKEND_NOT_READY, text, retry_after_seconds=retry_after_seconds(headers))
    if status in _REFUSED_KEY:
        return WeftError(Reason.BACKEND_ERROR, text)
    return _verdict(message, text, is_refusal=400 <= status < 500)


def stated_error(error: ErrorBody | str, *, has_begun: bool) -> WeftError:
    """What an error in the middle of a stream means, whose status was 200. `has_begun`: after content.

    Once an answer has begun the request was accepted, so what ends it is the server's.
    """
    message = error_words(error)
    text = f"the backend reported: {message}"
    if has_begun:
        return WeftError(Reason.BACKEND_ERROR, text)
    if isinstance(error, str):
        return _verdict(message, text, is_refusal=False)
    if error.type in _TOO_LONG or error.code == CONTEXT_LENGTH_CODE:
        return WeftError(Reason.CONTEXT_LENGTH_EXCEEDED, message)
    return _verdict(message, text, is_refusal=error.type in _WRONG_REQUEST or error.code in _WRONG_CONTENT)


def stated_answer(body: bytes) -> WeftError | None:
    """The error that a JSON answer of status 200 states in place of a stream; None: it states none."""
    try:
        names = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys()
    except JSON_FAULTS:
        return None
    words, kind = error_fields(body)
    is_answer = not words or "choices" in names
    return None if is_answer else stated_error(ErrorBody(message=words, type=kind), has_begun=False)


def _verdict(message: str, text: str, *, is_refusal: bool) -> WeftError:
    """The error of a server that could have served: the request's where its words or its status say so.

    A replica would refuse the same content, so it is final; see router_svc/policy/endpoints/failover.py.
    """
    if (is_refusal or refuses_content(message)) and refuses_length(message):
        return WeftError(Reason.CONTEXT_LENGTH_EXCEEDED, message)
    if is_refusal or refuses_content(message):
        return WeftError(Reason.BACKEND_REJECTED, text)
    return WeftError(Reason.BACKEND_ERROR, text)


def provider_refusal(status: int, body: bytes, headers: Mapping[str, str]) -> WeftError:
    """The same for a provider off the premises, where more is the operator's fault and none of it the caller's.

    What it says about a key is not repeated: such words quote parts of it.
    """
    kind = error_fields(body)[1]
    if status in _REFUSED_KEY:
        return _operators_fault(f"the provider refuses the key (status {status}); look at `api_key_env` of the model")
    if status == _UNPAID_STATUS or kind in UNPAID_CODES:
        return _operators_fault(f"the provider wants to be paid first (status {status}); look at your account there")
    if status in _WRONG_PLACE:
        advice = "look at `url` and `upstream_model` of the model"
        return _operators_fault(f"the provider knows no such model or address (status {status}); {advice}")
    return refusal(status, body, headers)


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """What the answer says about when to come back, at most MAX_RETRY_AFTER_SECONDS; None: nothing.

    A date is read against the answer's own date: the server's clock need not agree with ours.
    """
    said = headers.get("Retry-After", "").strip()
    if _SECONDS.fullmatch(said):
        return float(min(int(said), MAX_RETRY_AFTER_SECONDS))
    try:
        seconds = (parsedate_to_datetime(said) - parsedate_to_datetime(headers.get("Date", ""))).total_seconds()
    except (ValueError, TypeError):  # no dates, or only one of them says its zone
        return None
    return min(max(0.0, seconds), MAX_RETRY_AFTER_SECONDS)


def _operators_fault(message: str) -> WeftError:
    return WeftError(Reason.BACKEND_ERROR, message)
