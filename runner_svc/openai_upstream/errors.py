"""Converts errors and malformed answers of OpenAI-compatible servers to WeftError. Pure.

msgspec rejects NaN, unpaired surrogates, control characters and numbers too large for a float. For duplicate names the
last value counts, as in other JSON readers.
"""

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from types import MappingProxyType

import msgspec

from runner_svc.policy.answer_room import blames_answer_limit
from runner_svc.policy.engine_failures import last_words, refuses_content, refuses_length, without_tracebacks
from weft.kernel.errors.error_tree import LASTING, MAX_RETRY_AFTER_SECONDS, WeftError, invalid_field, quoting_engine
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.decoding import DECODE_FAULTS

JSON_FAULTS = DECODE_FAULTS
REPEATS = MappingProxyType({LASTING: "true"})
"""Metadata of errors that another attempt would get too."""


def malformed(what: str, error: Exception) -> WeftError:
    """Returns the error for unreadable JSON; its message starts with `what`."""
    why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    found = WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"{what} {why}", metadata=REPEATS)
    return quoting_engine(found, f"{what} unreadable JSON")


MAX_ERROR_CHARS = 500
_MAX_READ_CHARS = 65_536
"""An event of a stream can be far longer than the error bodies that are read."""
_NO_MESSAGE = "a Python exception without a message"
CONTEXT_LENGTH_CODE = "context_length_exceeded"
"""OpenAI's code for it; its type is that of any invalid request."""
UNPAID_CODES = frozenset({"insufficient_quota", "billing_hard_limit_reached"})
"""Provider codes sent with 429 if the account is empty: retrying does not help."""
SPECIFIC_CODES = UNPAID_CODES | {CONTEXT_LENGTH_CODE}
"""Codes that are more specific than the error type."""


class ErrorBody(msgspec.Struct):
    """An error in a response."""

    message: str | None = None
    type: str | None = None
    code: str | int | None = None


class _ErrorEnvelope(msgspec.Struct):
    error: ErrorBody | str | None = None
    message: str = ""
    type: object = None
    """Type of an error without an envelope, from SGLang and older versions of vLLM."""
    error_type: object = None
    """Type in errors of text-generation-inference, where `error` is a text."""
    detail: object = ""
    """FastAPI: a text, or a list of faults with their locations."""


def _for_callers(message: str) -> str:
    """Returns an engine's message without tracebacks, cut to MAX_ERROR_CHARS."""
    if not message.strip():
        return ""
    return "\n".join(without_tracebacks(message.splitlines()))[:MAX_ERROR_CHARS] or _NO_MESSAGE


def error_fields(body: bytes) -> tuple[str, str]:
    """Returns the message and the kind of a backend's error; the raw text if it is not JSON.

    The message may contain tracebacks, which callers must not see: see `_for_callers`. The kind is the error's type, or
    its code if that is one of SPECIFIC_CODES.
    """
    try:
        envelope = msgspec.json.decode(body, type=_ErrorEnvelope)
    except JSON_FAULTS:
        return body.decode("utf-8", "replace"), ""
    if isinstance(envelope.error, ErrorBody):
        code = envelope.error.code
        kind = str(code) if code in SPECIFIC_CODES else envelope.error.type or ""
        return envelope.error.message or "", kind
    detail = envelope.detail if isinstance(envelope.detail, str) else msgspec.json.encode(envelope.detail).decode()
    return envelope.error or envelope.message or detail, str(envelope.type or envelope.error_type or "")


BUSY = frozenset({429, 503, 529})
"""529 is Anthropic's status for overload."""
_LIMITED = 429
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_SPOKEN = re.compile(
    r"(?:try again|retry) (?:in|after) (?:([0-9]{1,4})m)?([0-9]{1,6}(?:\.[0-9]{1,9})?) ?(ms|s\b|sec)", re.IGNORECASE
)
"""OpenAI, Groq and Gemini: "try again in 1m2.5s"."""
_TOO_LONG = frozenset({"exceed_context_size_error", CONTEXT_LENGTH_CODE})
_WRONG_REQUEST = frozenset({"invalid_request_error", "BadRequestError"})
"""Error types for an invalid request: OpenAI's, vLLM's and SGLang's."""
_OWN_REASONS = MappingProxyType(
    {"repeated_line_loop": Reason.REPEATED_LINE_LOOP, "out_of_memory": Reason.OUT_OF_MEMORY}
)
"""Error types of weft's own server programs."""
_STREAM_OPTIONS = re.compile(r"stream.?options|include.?usage", re.IGNORECASE)
_INVALID_FIELD = "invalid_field"
"""Error type of weft's own server programs; the message starts with the name of a field."""
_WRONG_CONTENT = frozenset({400, 413, 415, 422})
_UNPAID_STATUS = 402
_REFUSED_KEY = frozenset({401, 403})
_WRONG_PLACE = frozenset({404, 405})


def refusal(status: int, body: bytes, headers: Mapping[str, str]) -> WeftError:
    """Returns the error for a response with a status other than 200. `headers` has lower-case names."""
    error = _refusal(status, body, headers)
    characters = len(body.decode("utf-8", "replace"))
    return quoting_engine(error, f"the engine answered {status}: {cause_words(error.reason, characters)}")


_CAUSES = MappingProxyType(
    {
        Reason.BACKEND_NOT_READY: "not ready",
        Reason.BACKEND_PROTOCOL_ERROR: "malformed answer",
        Reason.BACKEND_REJECTED: "request refused",
        Reason.CONTEXT_LENGTH_EXCEEDED: "context too long",
        Reason.INVALID_ARGUMENT: "invalid field",
        Reason.OUT_OF_MEMORY: "out of memory",
        Reason.RATE_LIMIT_EXCEEDED: "too many requests",
        Reason.REPEATED_LINE_LOOP: "repeated output",
        Reason.UNSUPPORTED_OPERATION: "not supported",
    }
)


def cause_words(reason: Reason, characters: int) -> str:
    """Returns the cause of an engine's error for logs and records, with the length of its message or answer."""
    return f"{_CAUSES.get(reason, 'internal error')} ({characters:,} characters, not kept)"


def _refusal(status: int, body: bytes, headers: Mapping[str, str]) -> WeftError:
    said, kind = error_fields(body)
    message = _for_callers(said)
    text = f"the engine answered {status}: {message}"
    if (own := own_error(kind, message)) is not None:
        return own
    if kind in _TOO_LONG:
        return _too_long(said)
    if kind == "not_supported_error" or status == 501:
        return WeftError(Reason.UNSUPPORTED_OPERATION, message)
    if status in BUSY:
        reason = Reason.RATE_LIMIT_EXCEEDED if status == _LIMITED else Reason.BACKEND_NOT_READY
        return WeftError(reason, text, retry_after_seconds=retry_after_seconds(headers, said))
    if status in _REFUSED_KEY:
        return _operators_fault(text)
    return _verdict(said, text, is_refusal=400 <= status < 500)


def own_error(kind: str, message: str) -> WeftError | None:
    """Returns the error for a type that only weft's own server programs send; None: another type."""
    if kind == _INVALID_FIELD:
        field, _, why = message.partition(": ")
        return invalid_field(field, why)
    reason = _OWN_REASONS.get(kind)
    return None if reason is None else WeftError(reason, message)


def stated_error(error: ErrorBody | str, *, has_begun: bool) -> WeftError:
    """Returns the error reported within a stream of status 200. `has_begun`: content was sent before.

    After content the request had been accepted, so the fault is the server's.
    """
    said = error if isinstance(error, str) else error.message or ""
    found = _stated_error(error, has_begun=has_begun)
    return quoting_engine(found, f"the engine reported: {cause_words(found.reason, len(said))}")


def _stated_error(error: ErrorBody | str, *, has_begun: bool) -> WeftError:
    said = (error if isinstance(error, str) else error.message or "")[:_MAX_READ_CHARS]
    message = _for_callers(said)
    text = f"the engine reported: {message}"
    if isinstance(error, ErrorBody) and (own := own_error(error.type or "", message)) is not None:
        return own
    if has_begun:
        return _failure(said, text)
    if isinstance(error, str):
        return _verdict(said, text, is_refusal=False)
    if error.type in _TOO_LONG or error.code == CONTEXT_LENGTH_CODE:
        return _too_long(said)
    return _verdict(said, text, is_refusal=error.type in _WRONG_REQUEST or error.code in _WRONG_CONTENT)


def stated_answer(body: bytes) -> WeftError | None:
    """Returns the error in a JSON answer of status 200 that replaces a stream; None: it contains none."""
    try:
        names = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys()
    except JSON_FAULTS:
        return None
    message, kind = error_fields(body)
    is_answer = not message or "choices" in names
    return None if is_answer else stated_error(ErrorBody(message=message, type=kind), has_begun=False)


def _verdict(said: str, text: str, *, is_refusal: bool) -> WeftError:
    """Returns the error of a working server: a refusal of the request if the message or status says so.

    `said`: the whole message; `text`: the error for callers, unless the request is too long.
    A refusal is final because replicas would refuse the same content; see router_svc/policy/endpoints/retry.py.
    """
    is_refusal = is_refusal or refuses_content(said)
    if is_refusal and refuses_length(said):
        return _too_long(said)
    if is_refusal:
        return WeftError(Reason.BACKEND_REJECTED, text)
    return _failure(said, text)


def _failure(said: str, text: str) -> WeftError:
    """Returns the error of a server that failed."""
    lacks_memory = last_words(said.splitlines()) is not None
    return WeftError(Reason.OUT_OF_MEMORY if lacks_memory else Reason.BACKEND_ERROR, text)


def _too_long(said: str) -> WeftError:
    """Returns the error of a request beyond the context; it names the limit of the answer if that is at fault."""
    metadata = {"field": "max_tokens"} if blames_answer_limit(said) else {}
    return WeftError(Reason.CONTEXT_LENGTH_EXCEEDED, _for_callers(said), metadata=metadata)


def refuses_stream_options(error: WeftError) -> bool:
    """Whether an engine has refused a request for the option that asks for usage in streams."""
    return error.reason is Reason.BACKEND_REJECTED and _STREAM_OPTIONS.search(error.message) is not None


def provider_refusal(status: int, body: bytes, headers: Mapping[str, str]) -> WeftError:
    """Returns the error for a remote provider's response; keys, accounts and addresses are the operator's concern.

    A message about a key is not repeated because it may quote parts of the key.
    """
    kind = error_fields(body)[1]
    if status in _REFUSED_KEY:
        return _operators_fault(f"the provider rejects the API key (status {status}); check `api_key_env` of the model")
    if status == _UNPAID_STATUS or kind in UNPAID_CODES:
        return _operators_fault(f"the provider requires payment (status {status}); check your account")
    if status in _WRONG_PLACE:
        advice = "check `url` and `upstream_model` of the model"
        return _operators_fault(f"the provider does not know the model or the URL (status {status}); {advice}")
    return refusal(status, body, headers)


def retry_after_seconds(headers: Mapping[str, str], said: str = "") -> float | None:
    """Returns how long a response asks to wait, in seconds, at most MAX_RETRY_AFTER_SECONDS; None: it does not say.

    It says so in `retry-after-ms`, Retry-After, or else its message `said`. A date is relative to the Date header
    because the server's clock may differ.
    """
    millis, text = (headers.get(name, "").strip() for name in ("retry-after-ms", "retry-after"))
    spoken = _SPOKEN.search(said)
    if _SECONDS.fullmatch(millis):
        seconds = float(millis) / 1e3
    elif _SECONDS.fullmatch(text):
        seconds = float(text)
    elif text:
        try:
            seconds = (parsedate_to_datetime(text) - parsedate_to_datetime(headers.get("date", ""))).total_seconds()
        except (ValueError, TypeError):  # invalid dates, or only one has a time zone
            return None
    elif spoken is not None:
        minutes, number, unit = spoken.groups()
        seconds = 60.0 * float(minutes or 0) + float(number) / (1e3 if unit.startswith("m") else 1.0)
    else:
        return None
    return min(max(0.0, seconds), MAX_RETRY_AFTER_SECONDS)


def _operators_fault(message: str) -> WeftError:
    return WeftError(Reason.BACKEND_ERROR, message, metadata=REPEATS)
