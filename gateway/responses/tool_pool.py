"""The extensions of the Responses API for pools of small models: decoding in one object, turns, translation."""

from gateway.config import RequestLimits
from gateway.responses.schema import Decoding, PoolMessage, ResponsesRequest
from weft.api.common.v1 import chat_pb2, sampling_pb2
from weft.kernel.errors import invalid_field

_UNKNOWN_SOURCES = frozenset({None, "auto", "mixed"})
# A template for translation names one source language in any case; the words below say that it may be another.
_FALLBACK_SOURCE = "en"
_FALLBACK_FOR_ENGLISH = "fr"
_DETECT = (
    "The text may be in any language, or in several. Find out each segment's language and translate all of it.\n\n"
)
_NAMES = {
    "top_k": "top_k",
    "top_p": "top_p",
    "temperature": "temperature",
    "repetition_penalty": "repeat_penalty",
    "max_tokens": "max_tokens",
}


def require_pool_messages(messages: list[PoolMessage]) -> None:
    """Raises INVALID_ARGUMENT unless the last turn is the user's."""
    if messages[-1].role != "user":
        raise invalid_field(f"messages[{len(messages) - 1}].role", "must be 'user': the last turn is the user's")


def fill_decoding(target: sampling_pb2.SamplingParams, decoding: Decoding, limits: RequestLimits) -> None:
    """Add what `decoding` says. Raises INVALID_ARGUMENT where the request says something else in another place."""
    for name, known_as in _NAMES.items():
        value = getattr(decoding, name)
        if value is None:
            continue
        if target.HasField(known_as) and getattr(target, known_as) != value:  # type: ignore[arg-type]
            raise invalid_field(f"decoding.{name}", "must not differ from what the request says outside of 'decoding'")
        setattr(target, known_as, value)
    if decoding.stop:
        if len(target.stop) + len(decoding.stop) > limits.max_stop:
            raise invalid_field("decoding.stop", f"must have at most {limits.max_stop} strings")
        target.stop.extend(decoding.stop)


def languages_of(request: ResponsesRequest) -> dict[str, object]:
    """The template's arguments for a translation; none where none is asked for."""
    target = request.target_lang_code
    if target is None:
        if request.source_lang_code is not None:
            raise invalid_field("target_lang_code", "is required with 'source_lang_code'")
        return {}
    source = request.source_lang_code
    if source in _UNKNOWN_SOURCES:
        is_english = target.lower().partition("-")[0].partition("_")[0] == _FALLBACK_SOURCE
        source = _FALLBACK_FOR_ENGLISH if is_english else _FALLBACK_SOURCE
    return {"source_lang_code": source, "target_lang_code": target}


def fill_languages(payload: chat_pb2.ChatPayload, request: ResponsesRequest) -> None:
    """Say before the last message's text that its language is to be found out, where that is so."""
    if request.target_lang_code is None or request.source_lang_code not in _UNKNOWN_SOURCES:
        return
    for part in payload.messages[-1].content:
        if part.WhichOneof("kind") == "text":
            part.text = _DETECT + part.text
            return
