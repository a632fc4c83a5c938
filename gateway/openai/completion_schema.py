"""POST /v1/completions, the legacy text completion."""

from typing import Annotated

from pydantic import Field

from gateway.intake.request_model import TextsOrTokens
from gateway.openai.sampling_schema import MAX_TOP_LOGPROBS, GenerationRequest


class CompletionRequest(GenerationRequest):
    """A text completion: raw text in, continuation out."""

    prompt: TextsOrTokens
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    """Only as many as `n`: nothing is generated and thrown away."""
