"""Sampling parameters of a request, and the checks that chat and text completions share."""

from gateway.config import RequestLimits
from gateway.intake.request_model import MAX_INT32
from gateway.openai.sampling_schema import GenerationRequest
from weft.api.common.v1 import sampling_pb2
from weft.kernel.errors import invalid_field

_COPIED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repeat_penalty",
)
_MAX_TOKEN_ID_DIGITS = 10


def fill_sampling(
    target: sampling_pb2.SamplingParams, request: GenerationRequest, max_tokens: int | None, limits: RequestLimits
) -> None:
    """Copy what the request sets, and only that: an absent field means the backend's own default."""
    given = request.model_fields_set
    for name in _COPIED:
        if name in given:
            value = getattr(request, name)
            if value is not None:
                setattr(target, name, value)
    if max_tokens is not None:
        target.max_tokens = max_tokens
    if request.stop is not None:
        target.stop.extend(_stop_texts(request.stop, limits))
    for token, bias in (request.logit_bias or {}).items():
        target.logit_bias[_token_id(token)] = bias


def require_choices(request: GenerationRequest, limits: RequestLimits) -> int:
    """How many answers are wanted per prompt. Raises INVALID_ARGUMENT above the limit."""
    count = request.n or 1
    if count > limits.max_choices:
        raise invalid_field("n", f"must be at most {limits.max_choices}")
    return count


def require_stream_options_fit(request: GenerationRequest) -> None:
    """Raises INVALID_ARGUMENT for options of a stream that was not asked for."""
    if request.stream_options is not None and not request.stream:
        raise invalid_field("stream_options", "is only allowed when 'stream' is true")


def wants_usage(request: GenerationRequest) -> bool:
    """Whether the stream ends with a chunk of token counts."""
    return request.stream_options is not None and bool(request.stream_options.include_usage)


def wants_events(request: GenerationRequest) -> bool:
    """Whether the stream tells signals, warnings and tools of the mesh in chunks of their own."""
    return request.stream_options is not None and bool(request.stream_options.include_weft_events)


def _stop_texts(stop: str | list[str], limits: RequestLimits) -> list[str]:
    texts = [stop] if isinstance(stop, str) else stop
    if len(texts) > limits.max_stop:
        raise invalid_field("stop", f"must have at most {limits.max_stop} strings")
    return texts


def _token_id(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= _MAX_TOKEN_ID_DIGITS and int(text) <= MAX_INT32:
        return int(text)
    raise invalid_field("logit_bias", "keys must be token ids, 0 to 2147483647")
