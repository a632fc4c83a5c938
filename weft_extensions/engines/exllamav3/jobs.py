"""Jobs of the library: arguments for a request, and finish reasons of results."""

import argparse
from typing import Any

from weft_extensions.engines.engine_host.http_server import LOOP, RefusedError
from weft_extensions.engines.engine_host.text_routes import logit_bias_of, sampling_of, schema_fault

_SAMPLER = frozenset(
    {
        *("temperature", "top_k", "top_p", "min_p", "rep_p", "freq_p", "pres_p", "temp_last"),
        *("rep_sustain_range", "rep_decay_range", "adaptive_target", "adaptive_decay"),
        *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_range"),
    }
)
_JOB = frozenset({"banned_strings", "min_new_tokens", "token_healing"})
_FINISH_REASONS = {"stop_token": "stop", "stop_string": "stop", "end_filter": "stop", "max_new_tokens": "length"}


class Jobs:
    """Creates the jobs of a loaded model."""

    def __init__(self, library: Any, tokenizer: Any, end_tokens: list[int], flags: argparse.Namespace) -> None:
        self._library = library
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._flags = flags

    def of(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the library's arguments for the parameters of a request. Raises RefusedError."""
        given, loops = sampling_of(body, _SAMPLER | _JOB, "ExLlamaV3"), self._flags
        if given.get("rep_p", 1.0) <= 0:
            raise RefusedError("rep_p: must be above 0; 1 has no effect")
        sampling = {name: value for name, value in given.items() if name in _SAMPLER}
        if "top_k" in sampling:
            sampling["top_k"] = max(sampling["top_k"], 0)
        bias = logit_bias_of(body, self._tokenizer.actual_vocab_size)
        finds_loops = body.get("ends_loops") and loops.loop_tokens
        # Without a sampler the library's defaults apply.
        sampler = self._library.ComboSampler(**sampling, logit_bias=bias or None) if sampling or bias else None
        return {
            "sampler": sampler,
            "stop_conditions": [*self._end_tokens, *filter(None, body.get("stop") or ())],
            "max_rq_tokens": loops.requeue_tokens or None,
            "stop_on_loop": (loops.loop_tokens, loops.loop_repeats) if finds_loops else None,
            **{name: value for name, value in given.items() if name in _JOB},
        }

    def filters(self, body: dict[str, Any]) -> list[Any]:
        """Returns the constraints of an answer. Raises RefusedError for a grammar that the library rejects."""
        schema, grammar = body.get("json_schema"), body.get("grammar")
        if not schema and not grammar:
            return []
        name, source = (
            ("response_format", {"json_schema": schema}) if schema else ("grammar", {"gbnf_grammar": grammar})
        )
        if schema and (why := schema_fault(schema)):
            raise RefusedError(f"{name}: {why}")
        try:
            return [self._library.LLGuidanceFilter(self._tokenizer, eos_after_completed=True, **source)]
        except (ValueError, RuntimeError) as error:
            raise RefusedError(f"{name}: {error}") from error

    def finish_reason(self, result: dict[str, Any], stopped: bool) -> str:
        """Returns the finish reason of an answer. Raises RefusedError if it ended in a loop."""
        reason = result["eos_reason"]
        if reason == "loop_detected" and not stopped:
            window, repeats = self._flags.loop_tokens, self._flags.loop_repeats
            message = f"the model repeats itself: its last {window} tokens are at least {repeats} times the same"
            raise RefusedError(message, LOOP)
        # At the last allowed token the library does not check for stop strings.
        return "stop" if stopped else _FINISH_REASONS.get(reason, "stop")
