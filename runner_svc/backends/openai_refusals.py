"""What an OpenAI-compatible server's refusals mean. Pure."""

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

import msgspec

from runner_svc.backends.engine_json import JSON_FAULTS
from runner_svc.backends.openai_errors import CONTEXT_LENGTH_CODE, UNPAID_CODES, ErrorBody, error_fields, error_words
from runner_svc.policy.content_refusals import refuses_content, refuses_length
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

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

    A replica would refuse the same content, so it is final; see router_svc/policy/failover.py.
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
