"""Fill-in-the-middle by llama.cpp's route /infill, whose stream has another form than a completion."""

import msgspec

from runner_svc.openai_upstream.errors import JSON_FAULTS
from weft.api.common.v1 import completion_pb2
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason

INFILL = "/infill"
_FINISH_WORDS = {"eos": "stop", "word": "stop", "limit": "length", "none": "stop"}
_NO_TOKENS = "this model does not support fill-in-the-middle: it has no tokens for it; omit it"


class _Timings(msgspec.Struct):
    cache_n: int = 0


class _Part(msgspec.Struct):
    content: str = ""
    stop: bool = False
    stop_type: str = ""
    stopping_word: str = ""
    tokens_evaluated: int = 0
    tokens_predicted: int = 0
    timings: msgspec.Raw = msgspec.Raw(b"{}")


def infill_prompt(payload: completion_pb2.CompletionPayload) -> dict[str, object]:
    """Returns the fields of the two texts. Raises INVALID_ARGUMENT for several prompts, or one of tokens."""
    if len(payload.prompts) != 1 or payload.prompts[0].WhichOneof("kind") != "text":
        raise invalid_field("prompt", "must be one text beside 'suffix'")
    if payload.HasField("logprobs"):
        raise invalid_field("logprobs", "cannot be combined with 'suffix'")
    return {"input_prefix": payload.prompts[0].text, "input_suffix": payload.suffix, "prompt": ""}


def as_completion(payload: bytes) -> bytes:
    """Returns a part of the stream as a chunk of a text completion; other payloads unchanged."""
    try:
        part = msgspec.json.decode(payload, type=_Part)
    except JSON_FAULTS:
        return payload
    if not part.stop:
        return msgspec.json.encode({"choices": [{"index": 0, "text": part.content}]}) if part.content else payload
    choice = {
        "index": 0,
        "text": part.content,
        "finish_reason": _FINISH_WORDS.get(part.stop_type, "stop"),
        "stop_reason": part.stopping_word or None,
    }
    usage = {
        "prompt_tokens": part.tokens_evaluated,
        "completion_tokens": part.tokens_predicted,
        "prompt_tokens_details": {"cached_tokens": _cached(part.timings)},
    }
    return msgspec.json.encode({"choices": [choice], "usage": usage, "timings": part.timings})


def _cached(timings: msgspec.Raw) -> int:
    try:
        return msgspec.json.decode(timings, type=_Timings).cache_n
    except JSON_FAULTS:
        return 0


def about_model(error: WeftError) -> WeftError:
    """Returns the error of a model without the tokens in the caller's words; others unchanged."""
    return invalid_field("suffix", _NO_TOKENS) if error.reason is Reason.UNSUPPORTED_OPERATION else error
