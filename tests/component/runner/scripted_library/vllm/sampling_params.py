"""Parameters of a generation."""

from enum import Enum

from vllm.exceptions import VLLMValidationError
from vllm.recorded import Fields, fields_of


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams(Fields):
    recorded = ("StructuredOutputsParams",)

    def __init__(self, **given: object) -> None:
        super().__init__(**given)
        if len(given) != 1:
            raise VLLMValidationError(f"You can only use one kind of structured outputs constraint: {given}")


class SamplingParams(Fields):
    recorded = ("SamplingParams",)
    __struct_fields__ = tuple(fields_of("SamplingParams"))

    def __init__(self, **given: object) -> None:
        super().__init__(**given)
        self.given = {name: value for name, value in given.items() if value is not None}
        if (self.temperature or 0) < 0:
            raise VLLMValidationError("temperature must be non-negative")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise VLLMValidationError("max_tokens must be at least 1")
