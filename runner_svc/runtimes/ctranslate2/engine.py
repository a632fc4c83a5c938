"""The engine: one model in CTranslate2, whose prompts and answers are token strings."""

import ctypes
import json
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner_svc.engine_host.engine import Job, RefusedError
from runner_svc.engine_host.messages import (
    Done,
    Forget,
    Generate,
    Ready,
    Sleep,
    Token,
    Tokenize,
    Tokens,
    Wake,
    Work,
)
from runner_svc.engine_host.stop_strings import StopMatcher
from runner_svc.engine_host.token_text import TokenBytes
from runner_svc.runtimes.ctranslate2.prefix_cache import Beginning, PrefixCache

TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"
CONFIG_FILE = "config.json"
MAX_JSON_BYTES = 64 * 1024 * 1024
"""Maximum size of a JSON file of a model; tokenizers of large vocabularies have 30 MB."""
RELOAD_SHARE = 20
"""Factor on the time of a load: so long lies between two loads that only drop kept prompts."""
UNLOAD_SECONDS = 2.0
"""The library unloads nothing while a thread of it works, which goes on for some ms after the last token is here: how
long to ask it again ..."""
UNLOAD_POLL_SECONDS = 0.01
"""... and how often."""
_SAMPLING = frozenset({"temperature", "top_k", "top_p", "repetition_penalty", "no_repeat_ngram_size"})
_BEAMS = frozenset({"beam_size", "length_penalty", "patience"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of a load."""

    model_path: Path
    """The folder of the converted model."""
    context_tokens: int
    device: str = "auto"
    compute_type: str = "int8"
    threads: int = 1
    slots: int = 1
    beam_size: int = 1
    prefix_cache_tokens: int = 0
    """Most tokens of kept prompts together; 0: none is kept."""


class CTranslate2Engine:
    """A loaded model, see Engine."""

    def __init__(self, library: Any, tokenizers: Any, options: EngineOptions) -> None:
        """Raises RefusedError for a folder without a file that it needs."""
        folder = options.model_path
        self._options = options
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
        # Each of the library's threads keeps its own prompts: with several, none can be relied on.
        self._prefixes = PrefixCache(options.prefix_cache_tokens if options.slots == 1 else 0)

    @property
    def facts(self) -> Ready:
        """See Engine.facts."""
        return Ready(context_tokens=self._options.context_tokens, slots=self._options.slots)

    def tokenize(self, request: Tokenize, job: Job) -> None:
        """See Engine.tokenize."""
        special = request.add_special and not request.has_template
        encoded = self._tokenizer.encode(request.text, add_special_tokens=special)
        pieces = [self._token_bytes.of(token) for token in encoded.tokens] if request.with_pieces else []
        job.send(Tokens(id=request.id, ids=encoded.ids, pieces=pieces))
        job.send(Done(id=request.id, prompt_tokens=0))

    def work(self, request: Work, job: Job) -> None:
        """See Engine.work."""
        match request:
            case Generate():
                self._generate(request, job)
            case Forget():
                job.send(Done(id=request.id, prompt_tokens=self._drop_prefixes()))
            case Sleep():
                self._unload()
                job.send(Done(id=request.id, prompt_tokens=0))
            case Wake():
                self._load_again()
                job.send(Done(id=request.id, prompt_tokens=0))

    def _generate(self, request: Generate, job: Job) -> None:
        began = time.perf_counter()
        prompts = [self._tokens(prompt, request.has_template) for prompt in request.prompts]
        tokenize_seconds = time.perf_counter() - began
        for tokens in prompts:
            if len(tokens) >= self._options.context_tokens:
                raise RefusedError(
                    "CONTEXT_LENGTH_EXCEEDED",
                    f"the prompt has {len(tokens)} tokens; the context of this model has "
                    f"{self._options.context_tokens}",
                )
        if request.json_object or request.json_schema or request.grammar:
            name = "grammar" if request.grammar else "response_format"
            raise RefusedError("INVALID_ARGUMENT", f"{name}: CTranslate2 follows no grammar; leave it out")
        if request.logit_bias:
            raise RefusedError("INVALID_ARGUMENT", "logit_bias: CTranslate2 has no such parameter; leave it out")
        options = self._decoding(request)
        if request.fresh:
            self._prefixes.forget()
        usage = Done(id=request.id, prompt_tokens=sum(map(len, prompts)), tokenize_seconds=tokenize_seconds)
        beams = self._beams_of(request)
        for place, tokens in enumerate(prompts):
            first = place * request.choice_count
            if beams > 1:
                self._search(_Answering(request, job, first, tokens, usage), beams, options)
                continue
            for number in range(request.choice_count):
                self._one_choice(_Answering(request, job, first + number, tokens, usage), options)
        job.send(usage)

    def _one_choice(self, answering: "_Answering", options: dict[str, Any]) -> None:
        """Generate one answer, token by token."""
        job, usage, tokens = answering.job, answering.usage, answering.tokens
        limit = self._limit(answering)
        beginning = self._beginning(tokens)
        matcher, began = StopMatcher(answering.request.stop), time.perf_counter()
        steps = self._generator.generate_tokens(
            list(tokens[beginning.tokens :]), **self._library_arguments(tokens, beginning, limit), **options
        )
        # Closing ends the library's work with its next token.
        with closing(steps):
            for count, step in enumerate(steps, start=1):
                if count == 1:
                    self._prefixes.note(tokens, beginning)
                    answering.note_prompt(beginning, time.perf_counter() - began)
                    began = time.perf_counter()
                job.raise_if_cancelled()
                usage.completion_tokens += 1
                ended = step.token in self._end_tokens
                text = "" if ended else matcher.feed(self._token_bytes.of(step.token))
                stopped = ended or matcher.stopped
                if stopped or count >= limit:
                    answering.send(text + matcher.finish(), "stop" if stopped else "length")
                    break
                answering.send(text)
        usage.decode_seconds += time.perf_counter() - began

    def _search(self, answering: "_Answering", beams: int, options: dict[str, Any]) -> None:
        """Generate the answers to one prompt by beam search: each comes whole, and none can be ended early."""
        tokens, usage = answering.tokens, answering.usage
        limit, count = self._limit(answering), answering.request.choice_count
        if count > beams:
            raise RefusedError("INVALID_ARGUMENT", f"n: must be at most the number of beams, {beams}")
        beginning, began = self._beginning(tokens), time.perf_counter()
        found = self._generator.generate_batch(
            [list(tokens[beginning.tokens :])],
            **self._library_arguments(tokens, beginning, limit),
            **options,
            beam_size=beams,
            num_hypotheses=count,
            include_prompt_in_result=False,
            return_end_token=True,
        )[0]
        self._prefixes.note(tokens, beginning)
        answering.note_prompt(beginning, 0.0)
        usage.is_undivided = True
        usage.decode_seconds += time.perf_counter() - began
        for number, sequence in enumerate(found.sequences):
            answering.job.raise_if_cancelled()
            matcher = StopMatcher(answering.request.stop)
            ended = bool(sequence) and sequence[-1] in self._end_tokens
            shown = sequence[:-1] if ended else sequence
            text = matcher.feed(b"".join(map(self._token_bytes.of, shown))) + matcher.finish()
            usage.completion_tokens += len(sequence)
            answering.send(text, "stop" if ended or matcher.stopped else "length", number)

    def _limit(self, answering: "_Answering") -> int:
        room = self._options.context_tokens - len(answering.tokens)
        wanted = answering.request.max_tokens
        return room if wanted is None else min(wanted, room)

    def _library_arguments(self, tokens: tuple[str, ...], beginning: Beginning, limit: int) -> dict[str, Any]:
        return {
            "max_length": limit,
            "end_token": list(self._end_tokens) or None,
            "static_prompt": list(tokens[: beginning.tokens]) or None,
            "cache_static_prompt": bool(beginning.tokens),
        }

    def _tokens(self, prompt: str | list[int], has_template: bool) -> tuple[str, ...]:
        if isinstance(prompt, str):
            # A template begins with the first token itself, where the model has one.
            tokens = tuple(self._tokenizer.encode(prompt, add_special_tokens=not has_template).tokens)
        else:
            found = [self._tokenizer.id_to_token(number) for number in prompt]
            if None in found:
                raise RefusedError("INVALID_ARGUMENT", f"prompt: {prompt[found.index(None)]} is the id of no token")
            tokens = tuple(found)
        if not tokens:
            raise RefusedError("INVALID_ARGUMENT", "prompt: must have at least one token")
        return tokens

    def _decoding(self, request: Generate) -> dict[str, Any]:
        """Returns the library's arguments for the sampling parameters of a request."""
        given = request.sampling
        for name in given:
            if name not in _SAMPLING | _BEAMS:
                raise RefusedError("INVALID_ARGUMENT", f"{name}: CTranslate2 has no such parameter")
        if given.get("repetition_penalty", 1.0) <= 0:
            raise RefusedError("INVALID_ARGUMENT", "repetition_penalty: must be above 0; 1 has no effect")
        always = ("repetition_penalty", "no_repeat_ngram_size")
        options: dict[str, Any] = {name: given[name] for name in always if name in given}
        if self._beams_of(request) > 1:
            return options | {name: given[name] for name in ("length_penalty", "patience") if name in given}
        temperature, top_k, top_p = given.get("temperature"), given.get("top_k"), given.get("top_p")
        if temperature == 0 or (temperature, top_k, top_p) == (None, None, None):
            return options  # the most probable token, which is the library's default
        return options | {
            "sampling_topk": max(top_k or 0, 0),
            "sampling_temperature": 1.0 if temperature is None else temperature,
            # The library refuses 0, which leaves the most probable token alone.
            "sampling_topp": 1.0 if top_p is None else max(top_p, 1e-6),
        }

    def _beams_of(self, request: Generate) -> int:
        """Returns the number of beams of a request."""
        return int(request.sampling.get("beam_size", self._options.beam_size))

    def _beginning(self, tokens: tuple[str, ...]) -> Beginning:
        """Returns the beginning of a prompt that the library keeps, or is to keep."""
        beginning = self._prefixes.choose(tokens)
        if beginning.wants_reload and time.monotonic() - self._loaded_at >= RELOAD_SHARE * self._load_seconds:
            self._drop_prefixes()
            beginning = self._prefixes.choose(tokens)
        return beginning

    def _drop_prefixes(self) -> int:
        """Free the memory of kept prompts, which only a new load of the model does; returns their tokens."""
        count = self._prefixes.usable_tokens
        self._unload()
        self._load_again()
        return count

    def _unload(self) -> None:
        self._prefixes.forget()
        deadline = time.monotonic() + UNLOAD_SECONDS
        self._generator.unload_model()
        while self._generator.model_is_loaded and time.monotonic() < deadline:
            time.sleep(UNLOAD_POLL_SECONDS)
            self._generator.unload_model()
        if self._generator.model_is_loaded:
            raise RefusedError("BACKEND_NOT_READY", "the engine is at work; its memory cannot be freed now")
        self._prefixes.reloaded()
        _return_free_memory()

    def _load_again(self) -> None:
        began = time.monotonic()
        self._generator.load_model()
        self._loaded_at = time.monotonic()
        self._load_seconds = self._loaded_at - began


def _return_free_memory() -> None:
    """Give freed memory back to the system; glibc keeps it for itself otherwise, others have no such call."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@dataclass(slots=True)
class _Answering:
    """The answers to one prompt of a request."""

    request: Generate
    job: Job
    choice: int
    """The first of them."""
    tokens: tuple[str, ...]
    usage: Done

    def send(self, text: str, finish_reason: str = "", number: int = 0) -> None:
        """Send a token of one of the answers."""
        self.job.send(Token(self.request.id, self.choice + number, text, finish_reason))

    def note_prompt(self, beginning: Beginning, seconds: float) -> None:
        """Record the computed prompt. Choices of one prompt share it: only the first one's is counted."""
        self.usage.prompt_seconds += seconds
        if beginning.cached and self.choice % self.request.choice_count == 0:
            self.usage.cached_tokens += beginning.tokens


def _tokenizer(tokenizers: Any, folder: Path) -> tuple[Any, TokenBytes]:
    """Returns the tokenizer of a model, and the bytes of its tokens."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise RefusedError(
            "INVALID_ARGUMENT",
            f"{path} does not exist; convert the model with: ct2-transformers-converter --copy_files {TOKENIZER_FILE}",
        )
    made = tokenizers.Tokenizer.from_file(str(path))
    made.no_truncation()
    made.no_padding()
    return made, TokenBytes(_json_file(path))


def _end_tokens(folder: Path, tokenizer: Any) -> frozenset[str]:
    """Returns the tokens that end an answer; empty: the library's default."""
    tokens = {_json_file(folder / CONFIG_FILE).get("eos_token")}
    numbers = _json_file(folder / GENERATION_FILE).get("eos_token_id")
    for number in numbers if isinstance(numbers, list) else [numbers]:
        if isinstance(number, int):
            tokens.add(tokenizer.id_to_token(number))
    return frozenset(token for token in tokens if isinstance(token, str))


def _json_file(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; empty: there is none."""
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_JSON_BYTES:
        raise RefusedError("INVALID_ARGUMENT", f"{path} is over {MAX_JSON_BYTES:,} bytes")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise RefusedError("INVALID_ARGUMENT", f"{path} is no JSON: {error}") from error
    return content if isinstance(content, dict) else {}
