"""How to sample: fields that chat and text completions share."""

from typing import Annotated

from pydantic import AliasChoices, ConfigDict, Field, Tag

from gateway.intake.request_model import (
    MAX_INT32,
    MAX_INT64,
    HandledRequest,
    StopAtFirstError,
    StrictModel,
    text_or_list,
)

MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS_ENTRIES = 300
MAX_TOP_LOGPROBS = 20

StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(StrictModel):
    """What a stream carries besides content."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted; padding against traffic analysis is not sent."""
    include_weft_events: bool | None = None
    """Extension: whether signals, warnings and tools that the mesh runs are chunks of their own instead of comments."""


class GenerationRequest(HandledRequest):
    """Fields of every request that generates text. Others are kept, to be handed on."""

    model_config = ConfigDict(extra="allow")

    model: str
    """A model or a pool of the mesh, `agent/` or `route/` and the name of one, or `auto`."""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    stop: (
        Annotated[
            Annotated[StopText, Tag("~text")] | Annotated[list[StopText], StopAtFirstError(), Tag("~list")],
            text_or_list("Input should be a string or a list of strings"),
        ]
        | None
    ) = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_penalty: Annotated[float, Field(ge=0, le=2)] | None = Field(
        default=None, validation_alias=AliasChoices("repeat_penalty", "repetition_penalty")
    )
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIAS_ENTRIES)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
