"""Sampling parameters and stream options of chat and text completions: schema, validation, translation."""

from typing import Annotated, Any, LiteralString

from pydantic import AliasChoices, BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError
from typing_extensions import override

from gateway.gateway_config import RequestLimits
from gateway.intake.request_model import (
    EXTENSION_PREFIX,
    MAX_INT32,
    MAX_INT64,
    HandledRequest,
    StopAtFirstError,
    StrictModel,
    text_or_list,
)
from weft.api.common.v1 import sampling_pb2
from weft.kernel.errors.error_tree import invalid_field

MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS_ENTRIES = 300
MAX_TOP_LOGPROBS = 20

StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopSequences = Annotated[
    Annotated[StopText, Tag("~text")] | Annotated[list[StopText], StopAtFirstError(), Tag("~list")],
    text_or_list("must be a string or a list of strings"),
]
"""One or more texts at which an answer ends."""
Penalty = Annotated[float, Field(ge=-2, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
_NO_TOKENS: LiteralString = "must be at least 1: not every engine can process a prompt without an answer"


def _token_limit(value: object) -> object:
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    if whole == 0 and isinstance(whole, int) and not isinstance(whole, bool):
        raise PydanticCustomError("no_tokens", _NO_TOKENS)
    return None if whole == -1 and isinstance(whole, int) else whole


TokenLimit = Annotated[Annotated[int, Field(ge=1, le=MAX_INT32)] | None, BeforeValidator(_token_limit)]
"""Maximum number of answer tokens. -1: no limit, as in llama.cpp's server and LangChain; 8.0 is accepted as 8."""


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Any = None
    """Accepted and not used: no padding against traffic analysis is sent."""
    include_weft_events: bool | None = None
    """Extension: whether signals, warnings and tools that the mesh runs are separate chunks instead of comments."""


class GenerationRequest(HandledRequest):
    """Fields of every request that generates text. Unknown fields are passed to the engine."""

    model: str
    """A model or pool of the mesh, `agent/NAME`, `route/NAME`, or `auto`."""
    max_tokens: TokenLimit = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    stop: StopSequences | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_penalty: Annotated[float, Field(ge=0, le=2)] | None = Field(
        default=None, validation_alias=AliasChoices("repeat_penalty", "repetition_penalty")
    )
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIAS_ENTRIES)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @override
    def uses(self, name: str) -> bool:
        return not name.startswith(EXTENSION_PREFIX)


SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repeat_penalty",
)
"""Fields with the same name in `SamplingParams`."""
_MAX_TOKEN_ID_DIGITS = 10


def fill_sampling(
    target: sampling_pb2.SamplingParams, request: GenerationRequest, max_tokens: int | None, limits: RequestLimits
) -> None:
    """Copies the parameters that the request sets; for absent ones the backend's defaults apply."""
    given = request.__pydantic_fields_set__
    for name in SAMPLING_FIELDS:
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
    """Returns the number of choices per prompt. Raises INVALID_ARGUMENT above the limit."""
    count = request.n or 1
    if count > limits.max_choices:
        raise invalid_field("n", f"must be at most {limits.max_choices}")
    return count


def require_stream_options_fit(request: GenerationRequest) -> None:
    """Raises INVALID_ARGUMENT for stream options without `stream`."""
    if request.stream_options is not None and not request.stream:
        raise invalid_field("stream_options", "is only allowed when 'stream' is true")


def wants_usage(request: GenerationRequest) -> bool:
    """Whether the stream ends with a usage chunk."""
    return request.stream_options is not None and bool(request.stream_options.include_usage)


def wants_events(request: GenerationRequest) -> bool:
    """Whether signals, warnings and mesh tools are separate chunks of the stream."""
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
