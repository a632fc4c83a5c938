"""A stand-in for the CTranslate2 library, with the calls that the engine makes and none of the mathematics.

As the real one it keeps the state after a static prompt until the model is unloaded, and refuses an empty prompt.
SCRIPTED_CTRANSLATE2 holds switches as JSON.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripted_faults import misbehave_at_load
from tokenizers import letter_of

SWITCHES: dict[str, Any] = json.loads(os.environ.get("SCRIPTED_CTRANSLATE2", "{}"))
END = "</s>"

if SWITCHES.get("import_fails"):
    raise ImportError("libctranslate2.so: cannot open shared object file")


class Generator:
    def __init__(
        self,
        model_path: str,
        device: str = "cpu",
        *,
        compute_type: str = "default",
        inter_threads: int = 1,
        intra_threads: int = 0,
    ) -> None:
        assert (Path(model_path) / "model.bin").is_file()
        assert intra_threads > 0
        misbehave_at_load(SWITCHES)
        sys.stderr.write(f"loaded on {device} as {compute_type}, {inter_threads} at once\n")
        self.model_is_loaded = True
        self._refusals = 0
        self._states: set[tuple[str, ...]] = set()

    def unload_model(self) -> None:
        self._refusals += 1
        self.model_is_loaded = self._refusals <= int(SWITCHES.get("refused_unloads", 0))
        self._states.clear()
        sys.stderr.write("unloaded\n")

    def load_model(self) -> None:
        self.model_is_loaded = True

    def generate_tokens(
        self,
        prompt: list[str],
        *,
        max_length: int = 512,
        sampling_topk: int = 1,
        sampling_topp: float = 1,
        sampling_temperature: float = 1,
        repetition_penalty: float = 1,
        no_repeat_ngram_size: int = 0,
        end_token: list[str] | None = None,
        static_prompt: list[str] | None = None,
        cache_static_prompt: bool = True,
    ) -> Iterator[SimpleNamespace]:
        assert 0 < sampling_topp <= 1
        assert repetition_penalty > 0
        assert no_repeat_ngram_size >= 0
        assert end_token == [END]
        options = {"top_k": sampling_topk, "temperature": sampling_temperature}
        self._compute(prompt, static_prompt, cache_static_prompt)
        tokens = self._answer([*(static_prompt or ()), *prompt], options)
        for step, token in enumerate(tokens):
            time.sleep(SWITCHES.get("seconds_per_token", 0.0))
            is_last = token == END or step + 1 == max_length
            yield SimpleNamespace(token=token, is_last=is_last, step=step)
            if is_last:
                return

    def generate_batch(
        self,
        start_tokens: list[list[str]],
        *,
        beam_size: int,
        num_hypotheses: int,
        include_prompt_in_result: bool,
        return_end_token: bool,
        max_length: int = 512,
        length_penalty: float = 1,
        patience: float = 1,
        end_token: list[str] | None = None,
        static_prompt: list[str] | None = None,
        cache_static_prompt: bool = True,
    ) -> list[SimpleNamespace]:
        assert beam_size >= num_hypotheses
        assert not include_prompt_in_result
        assert return_end_token
        assert end_token == [END]
        self._compute(start_tokens[0], static_prompt, cache_static_prompt)
        options = {"beams": beam_size, "length_penalty": length_penalty, "patience": patience}
        answer = []
        for token in self._answer([*(static_prompt or ()), *start_tokens[0]], options):
            answer.append(token)
            if token == END or len(answer) == max_length:
                break
        return [SimpleNamespace(sequences=[answer] * num_hypotheses)]

    def _compute(self, prompt: list[str], static_prompt: list[str] | None, caches: bool) -> None:
        if not prompt:
            raise RuntimeError("must be real number, not NoneType")
        if not self.model_is_loaded:
            raise RuntimeError("The model for this generator was unloaded")
        static = tuple(static_prompt or ())
        assert caches == bool(static), "a static prompt is given to be kept"
        # What the engine says about its prompts is checked against what this library has.
        sys.stderr.write(f"prompt: {len(static) if static in self._states else 0} of {len(static)} kept\n")
        if static:
            self._states.add(static)
            sys.stderr.write(f"holds: {sum(map(len, self._states))}\n")
        time.sleep(SWITCHES.get("prefill_seconds", 0.0))

    def _answer(self, prompt: list[str], options: dict[str, Any]) -> Iterator[str]:
        answer = SWITCHES.get("answer", "The sea is calm and blue today.")
        if SWITCHES.get("echo_options"):
            answer = json.dumps(options)
        if SWITCHES.get("echo_prompt"):
            yield from prompt
            answer = ""
        while SWITCHES.get("endless"):
            yield from map(letter_of, answer.encode())
        yield from map(letter_of, answer.encode())
        yield END
