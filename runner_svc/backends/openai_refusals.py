"""What an OpenAI-compatible server's refusals mean. Pure."""

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from runner_svc.backends.openai_errors import CONTEXT_LENGTH_CODE, UNPAID_CODES, error_fields
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

MAX_RETRY_AFTER_SECONDS = 3600
BUSY = frozenset({429, 503})
_SECONDS = re.compile(r"[0-9]{1,9}")
_TOO_LONG = frozenset({"exceed_context_size_error", CONTEXT_LENGTH_CODE})
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
    return WeftError(Reason.BACKEND_REJECTED if 400 <= status < 500 else Reason.BACKEND_ERROR, text)


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
