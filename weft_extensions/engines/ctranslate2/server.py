"""The server program of CTranslate2.

PYTHON .../weft_extensions/engines/engine_host/bootstrap.py weft_extensions.engines.ctranslate2.server --model FOLDER
"""

import argparse
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft_extensions.engines.ctranslate2.prefix_cache import Beginning, PrefixCache
from weft_extensions.engines.engine_host.ctranslate2 import load_cuda_libraries, unload
from weft_extensions.engines.engine_host.http_server import (
    Caller,
    RefusedError,
    import_library,
    positive,
    program_parser,
    serve,
)
from weft_extensions.engines.engine_host.text_routes import (
    StopMatcher,
    TextEngine,
    TokenBytes,
    Usage,
    check_prompt,
    json_file,
    sampling_of,
    send_choice,
    send_usage,
    token_limit,
)

TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"
CONFIG_FILE = "config.json"
RELOAD_SHARE = 20
"""Minimum interval between reloads that only drop cached prompts, as a multiple of the load time."""
_SAMPLING = frozenset({"temperature", "top_k", "top_p", "repetition_penalty", "no_repeat_ngram_size"})
_BEAMS = frozenset({"beam_size", "length_penalty", "patience"})


class CTranslate2Engine(TextEngine):
    """A loaded model, see Engine."""

    def __init__(self, library: Any, tokenizers: Any, options: argparse.Namespace) -> None:
        """Raises RefusedError if the folder lacks a required file."""
        folder: Path = options.model
        self.context_tokens, self.slots, self._usual_beams = options.context_tokens, options.slots, options.beam_size
        self._tokenizer, self._token_bytes = _tokenizer(tokenizers, folder)
        self._end_tokens = _end_tokens(folder, self._tokenizer)
        began = time.monotonic()
        self._generator = library.Generator(
            str(folder),
            device=options.device,
            compute_type=options.compute_type,
            inter_threads=options.slots,
            intra_threads=options.threads,
        )
        self._loaded_at = time.monotonic()
        self._load_seconds = self._loaded_at - began
        # Each thread of the library has its own cache, so with several threads no cached prefix can be relied on.
        kept = self.context_tokens if options.prefix_cache_tokens is None else options.prefix_cache_tokens
        self._prefixes = PrefixCache(kept if options.slots == 1 else 0)

    def tokens_of(self, text: str, *, add_special: bool) -> list[int]:
        """See Engine.tokens_of."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special).ids
        return ids

    def piece_of(self, token: int) -> bytes:
        """See Engine.piece_of."""
        return self._token_bytes.of(self._tokenizer.id_to_token(token))

    def forget(self) -> int:
        """Frees cached prompts, which requires a reload of the model; returns their number of tokens."""
        count = self._prefixes.usable_tokens
        self.sleep()
        self.wake()
        return count

    def sleep(self) -> None:
        """See Engine.sleep."""
        self._prefixes.forget()
        unload(self._generator)
        self._prefixes.reloaded()

    def wake(self) -> None:
        """See Engine.wake."""
        began = time.monotonic()
        self._generator.load_model()
        self._loaded_at = time.monotonic()
        self._load_seconds = self._loaded_at - began

    def complete(self, body: dict[str, Any], caller: Caller) -> None:
        """See Engine.complete."""
        prompts, usage = self.read_prompts(body)
        for name in ("grammar", "json_schema", "logit_bias"):
            if body.get(name):
                given = "response_format" if name == "json_schema" else name
                raise RefusedError(f"{given}: CTranslate2 has no such parameter; omit it")
        options = self._decoding(body)
        if body.get("cache_prompt") is False:
            self._prefixes.forget()
        beams, count = self._beams_of(body), body.get("n") or 1
        for index, tokens in enumerate(prompts):
            if beams > 1:
                self._search(_Answering(body, caller, index * count, count, tokens, usage), beams, options)
                continue
            for number in range(count):
                self._one_choice(_Answering(body, caller, index * count + number, count, tokens, usage), options)
        send_usage(caller, usage)

    def _one_choice(self, answering: "_Answering", options: dict[str, Any]) -> None:
        caller, usage, tokens = answering.caller, answering.usage, answering.tokens
        limit = token_limit(answering.body, len(tokens), self.context_tokens)
        beginning = self._beginning(tokens)
        matcher, began = answering.matcher(), time.perf_counter()
        steps = self._generator.generate_tokens(
            list(tokens[beginning.tokens :]), **self._library_arguments(tokens, beginning, limit), **options
        )
        # Closing ends the library's work at its next token.
        with closing(steps):
            for count, step in enumerate(steps, start=1):
                if count == 1:
                    self._prefixes.note(tokens, beginning)
                    answering.note_prompt(beginning, time.perf_counter() - began)
                    began = time.perf_counter()
                caller.raise_if_gone()
                usage.completion_tokens += 1
                ended = step.token in self._end_tokens
                text = "" if ended else matcher.feed(self._token_bytes.of(step.token))
                stopped = ended or matcher.stopped
                if stopped or count >= limit:
                    send_choice(caller, answering.choice, text + matcher.finish(), "stop" if stopped else "length")
                    break
                send_choice(caller, answering.choice, text, None)
        usage.decode_seconds += time.perf_counter() - began

    def _search(self, answering: "_Answering", beams: int, options: dict[str, Any]) -> None:
        """Generates the answers to a prompt by beam search; they are complete at the end and cannot be cancelled."""
        caller, usage, tokens = answering.caller, answering.usage, answering.tokens
        if answering.count > beams:
            raise RefusedError(f"n: must be at most the number of beams, {beams}")
        limit = token_limit(answering.body, len(tokens), self.context_tokens)
        beginning, began = self._beginning(tokens), time.perf_counter()
        found = self._generator.generate_batch(
            [list(tokens[beginning.tokens :])],
            **self._library_arguments(tokens, beginning, limit),
            **options,
            beam_size=beams,
            num_hypotheses=answering.count,
            include_prompt_in_result=False,
            return_end_token=True,
        )[0]
        self._prefixes.note(tokens, beginning)
        answering.note_prompt(beginning, 0.0)
        usage.is_undivided = True
        usage.decode_seconds += time.perf_counter() - began
        for number, sequence in enumerate(found.sequences):
            caller.raise_if_gone()
            matcher = answering.matcher()
            ended = bool(sequence) and sequence[-1] in self._end_tokens
            shown = sequence[:-1] if ended else sequence
            text = matcher.feed(b"".join(map(self._token_bytes.of, shown))) + matcher.finish()
            usage.completion_tokens += len(sequence)
            send_choice(caller, answering.choice + number, text, "stop" if ended or matcher.stopped else "length")

    def _library_arguments(self, tokens: tuple[str, ...], beginning: Beginning, limit: int) -> dict[str, Any]:
        return {
            "max_length": limit,
            "end_token": list(self._end_tokens) or None,
            "static_prompt": list(tokens[: beginning.tokens]) or None,
            "cache_static_prompt": bool(beginning.tokens),
        }

    def prompt_of(self, prompt: str | list[int], *, add_special: bool) -> tuple[str, ...]:
        """See TextEngine.prompt_of."""
        if isinstance(prompt, str):
            tokens = self._tokenizer.encode(prompt, add_special_tokens=add_special).tokens
        else:
            tokens = [self._tokenizer.id_to_token(number) for number in prompt]
            if None in tokens:
                raise RefusedError(f"prompt: {prompt[tokens.index(None)]} is not a token id")
        check_prompt(tokens, self.context_tokens)
        return tuple(tokens)

    def _decoding(self, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the library's arguments for the sampling parameters of a request."""
        given = sampling_of(body, _SAMPLING | _BEAMS, "CTranslate2")
        if given.get("repetition_penalty", 1.0) <= 0:
            raise RefusedError("repetition_penalty: must be above 0; 1 has no effect")
        always = ("repetition_penalty", "no_repeat_ngram_size")
        options: dict[str, Any] = {name: given[name] for name in always if name in given}
        if self._beams_of(body) > 1:
            return options | {name: given[name] for name in ("length_penalty", "patience") if name in given}
        temperature, top_k, top_p = given.get("temperature"), given.get("top_k"), given.get("top_p")
        if temperature == 0 or (temperature, top_k, top_p) == (None, None, None):
            return options  # greedy decoding, which is the library's default
        return options | {
            "sampling_topk": max(top_k or 0, 0),
            "sampling_temperature": 1.0 if temperature is None else temperature,
            # The library rejects 0, which would mean greedy decoding.
            "sampling_topp": 1.0 if top_p is None else max(top_p, 1e-6),
        }

    def _beams_of(self, body: dict[str, Any]) -> int:
        return int(body.get("beam_size", self._usual_beams))

    def _beginning(self, tokens: tuple[str, ...]) -> Beginning:
        """Returns the cached or cacheable prefix of a prompt."""
        beginning = self._prefixes.choose(tokens)
        if beginning.wants_reload and time.monotonic() - self._loaded_at >= RELOAD_SHARE * self._load_seconds:
            self.forget()
            beginning = self._prefixes.choose(tokens)
        return beginning


@dataclass(slots=True)
class _Answering:
    """The answers to one prompt of a request."""

    body: dict[str, Any]
    caller: Caller
    choice: int
    """Index of the first choice."""
    count: int
    """Choices per prompt."""
    tokens: tuple[str, ...]
    usage: Usage

    def matcher(self) -> StopMatcher:
        """Returns a matcher for the request's stop strings."""
        return StopMatcher(self.body.get("stop") or ())

    def note_prompt(self, beginning: Beginning, seconds: float) -> None:
        """Records a computed prompt. Only the first of its choices counts cached tokens."""
        self.usage.prompt_seconds += seconds
        if beginning.cached and self.choice % self.count == 0:
            self.usage.cached_tokens += beginning.tokens


def _tokenizer(tokenizers: Any, folder: Path) -> tuple[Any, TokenBytes]:
    """Returns the tokenizer of a model, and the bytes of its tokens."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise RefusedError(
            f"{path} does not exist; convert the model with: ct2-transformers-converter --copy_files {TOKENIZER_FILE}",
        )
    made = tokenizers.Tokenizer.from_file(str(path))
    made.no_truncation()
    made.no_padding()
    return made, TokenBytes(json_file(path))


def _end_tokens(folder: Path, tokenizer: Any) -> frozenset[str]:
    """Returns the tokens that end an answer; empty: the library's default."""
    tokens = {json_file(folder / CONFIG_FILE).get("eos_token")}
    numbers = json_file(folder / GENERATION_FILE).get("eos_token_id")
    for number in numbers if isinstance(numbers, list) else [numbers]:
        if isinstance(number, int):
            tokens.add(tokenizer.id_to_token(number))
    return frozenset(token for token in tokens if isinstance(token, str))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags of this program."""
    parser = program_parser("ctranslate2_server", __doc__)
    parser.add_argument("--context-tokens", type=positive, default=2048)
    parser.add_argument("--device", choices=["cpu", "cuda", "auto"], default="auto")
    parser.add_argument("--compute-type", default="int8")
    parser.add_argument("--beam-size", type=positive, default=1)
    parser.add_argument("--prefix-cache-tokens", type=int, help="of kept prompts together; 0: none; default: context")
    return parser.parse_args(argv)


def load(options: argparse.Namespace) -> CTranslate2Engine:
    """Loads the model. Raises ImportError, RefusedError."""
    if options.device != "cpu":
        load_cuda_libraries(Path(sys.prefix))
    return CTranslate2Engine(import_library("ctranslate2"), import_library("tokenizers"), options)


def main() -> None:
    """Loads the model and serves requests."""
    serve(load, parse_arguments())


if __name__ == "__main__":
    main()
