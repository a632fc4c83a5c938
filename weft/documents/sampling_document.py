"""Default parameters of an agent as a document, with the names of the OpenAI API. Ranges: common/v1/sampling.proto."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from weft.documents.document_base import MAX_INT32, Count

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIASES = 300

Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _token_ids(value: Any) -> Any:
    """Keys of JSON objects are strings, also where they are numbers."""
    if not isinstance(value, dict):
        return value
    return {int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key: value[key] for key in value}


class SamplingDocument(BaseModel):
    """Parameters for requests that leave them out. One that is absent is the backend's own default."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """The most tokens to generate per choice."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Softmax temperature; 0 is greedy."""
    top_p: Share | None = None
    """Nucleus sampling mass."""
    top_k: Count | None = None
    """Keep only this many most likely tokens; 0 switches it off."""
    min_p: Share | None = None
    """Drop tokens less likely than this share of the most likely one."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    """Seed of the sampler."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)], ...] = Field(
        default=(), max_length=MAX_STOP_STRINGS, strict=False
    )
    """Strings that end a choice."""
    presence_penalty: Penalty | None = None
    """Penalty for tokens already present."""
    frequency_penalty: Penalty | None = None
    """Penalty by how often a token occurred."""
    repeat_penalty: Annotated[float, Field(ge=0, le=2)] | None = None
    """Multiplicative repetition penalty; 1 switches it off."""
    logit_bias: Annotated[
        dict[Annotated[int, Field(ge=0, le=MAX_INT32)], Annotated[float, Field(ge=-100, le=100)]],
        BeforeValidator(_token_ids),
        Field(max_length=MAX_LOGIT_BIASES),
    ] = {}
    """Added to a token's logit, by token id."""
