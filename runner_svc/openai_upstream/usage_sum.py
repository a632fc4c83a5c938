"""Sum of the tokens and times that a server reports within a stream."""

import math

import msgspec

from runner_svc.openai_upstream.chunks import Chunk, ChunkUsage, Metrics
from runner_svc.openai_upstream.errors import JSON_FAULTS
from weft.api.common.v1 import receipt_pb2, usage_pb2

NOTHING = frozenset({b"", b"null"})
"""Raw JSON without information."""


class UsageSum:
    """Adds up a stream's usage: llama-server reports usage and timings once per choice, other servers once.

    Some servers send the running total of the choice with every chunk; then the last one counts.
    """

    def __init__(self, expected_choices: int, choices_per_prompt: int) -> None:
        self._expected_choices = expected_choices
        self._choices_per_prompt = choices_per_prompt
        self._of_choices: dict[int, ChunkUsage] = {}
        self._of_stream: ChunkUsage | None = None
        """The last usage without a choice; it includes the usage of all choices."""
        self._completion_tokens = 0
        self._reasoning_tokens = 0
        self._prefill_ms: float | None = None
        """None: unknown, as for `_decode_ms`."""
        self._decode_ms: float | None = None
        self._tokenize_ms: float | None = None
        self._undivided_ms = 0.0
        self._tokens_per_second = 0.0
        self.has_figures = False
        """Whether the engine has reported usage or timings."""

    def add(self, chunk: Chunk) -> None:
        """Adds the usage and timings of a chunk."""
        usage, timings = chunk.usage, chunk.timings
        self.has_figures = True
        if usage is not None and chunk.choices:
            self._of_choices[chunk.choices[0].index] = usage
        elif usage is not None:
            self._of_stream = usage
            self._completion_tokens += usage.completion_tokens
            self._reasoning_tokens += usage.reasoning_tokens
        if timings is not None:
            if timings.prompt_ms is not msgspec.UNSET:
                self._prefill_ms = (self._prefill_ms or 0.0) + timings.prompt_ms
            if timings.predicted_ms is not msgspec.UNSET:
                self._decode_ms = (self._decode_ms or 0.0) + timings.predicted_ms
            if timings.tokenize_ms is not msgspec.UNSET:
                self._tokenize_ms = timings.tokenize_ms
            self._undivided_ms += timings.undivided_ms
        elif self._expected_choices == 1 and bytes(chunk.metrics) not in NOTHING:
            # For several prompts, vLLM reports only the times of the last one.
            self._take_metrics(chunk.metrics)

    def receipt(self) -> receipt_pb2.Receipt:
        """Returns the engine's part of the receipt."""
        usage = self._usage()
        receipt = receipt_pb2.Receipt(usage=usage)
        if (compute_ms := (self._prefill_ms or 0.0) + (self._decode_ms or 0.0) + self._undivided_ms) > 0:
            receipt.gpu_time.FromMicroseconds(int(compute_ms * 1e3))
        if self._prefill_ms is not None:
            receipt.engine_timings.prefill_time.FromMicroseconds(int(self._prefill_ms * 1e3))
        if self._decode_ms is not None:
            receipt.engine_timings.decode_time.FromMicroseconds(int(self._decode_ms * 1e3))
        if self._tokenize_ms is not None:
            receipt.engine_timings.tokenize_time.FromMicroseconds(int(self._tokenize_ms * 1e3))
        rate = self._tokens_per_second
        if not rate and (decode_ms := self._decode_ms or self._undivided_ms):
            rate = usage.completion_tokens / decode_ms * 1e3
        if rate and math.isfinite(rate):
            receipt.tokens_per_second = rate
        return receipt

    def _take_metrics(self, metrics: msgspec.Raw) -> None:
        """Takes vLLM's timings; a field of another form is another server's and is ignored."""
        try:
            found = msgspec.json.decode(metrics, type=Metrics)
        except JSON_FAULTS:
            return
        if found.time_to_first_token_ms is None or found.generation_time_ms is None:
            return
        self._prefill_ms, self._decode_ms = found.time_to_first_token_ms, found.generation_time_ms
        if found.mean_itl_ms:
            self._tokens_per_second = 1e3 / found.mean_itl_ms

    def _usage(self) -> usage_pb2.Usage:
        """Returns the usage. The tokens of a prompt with several choices count once."""
        if self._of_stream is not None:
            prompts = [self._of_stream]
            completion, reasoning = self._completion_tokens, self._reasoning_tokens
        else:
            per_prompt = {index // self._choices_per_prompt: usage for index, usage in self._of_choices.items()}
            prompts = list(per_prompt.values())
            completion = sum([usage.completion_tokens for usage in self._of_choices.values()])
            reasoning = sum([usage.reasoning_tokens for usage in self._of_choices.values()])
        found = usage_pb2.Usage(completion_tokens=completion, reasoning_tokens=reasoning)
        for prompt in prompts:
            found.prompt_tokens += prompt.prompt_tokens
            found.cached_prompt_tokens += prompt.cached_tokens
            found.cache_write_prompt_tokens += prompt.cache_write_tokens
        return found
