"""The engine: one model in llama-cpp-python, through the library's public calls, one request at a time.

`create_completion` is not used: it hides the number of tokens, and its prefill can be neither observed nor ended.
"""

import inspect
import json
import logging
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from runner_svc.engine_host.engine import Job, RefusedError, Send
from runner_svc.engine_host.messages import (
    Done,
    Embed,
    Forget,
    Generate,
    LoadProgress,
    PromptProgress,
    Ready,
    Token,
    Tokenize,
    Tokens,
    ToRunner,
    Vector,
    Work,
)
from runner_svc.engine_host.stop_strings import StopMatcher

MAX_SCHEMA_CHARS = 64 * 1024
MAX_REPETITIONS = 2000
"""Maximum number of repetitions of one item, as in llama.cpp's own grammars; 10**9 would take all memory."""
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_BRACES = re.compile(r"\{(\d*)(?:,(\d*))?\}")


def schema_fault(schema: str) -> str:
    """Returns the fault of a schema that is too large; empty: none."""
    if len(schema) > MAX_SCHEMA_CHARS:
        return f"the schema must be at most {MAX_SCHEMA_CHARS:,} characters"
    left: list[Any] = [json.loads(schema)]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        elif isinstance(part, dict):
            if any(count > MAX_REPETITIONS for count in _counts(part)):
                return f"at most {MAX_REPETITIONS:,} repetitions can be asked for"
            left += part.values()
    return ""


def _counts(part: dict[str, Any]) -> list[float]:
    counts = [value for name in _COUNTS if isinstance(value := part.get(name), int | float)]
    pattern = part.get("pattern")
    if isinstance(pattern, str):
        # Nine digits are over the limit already.
        counts += [float(digits[:9]) for braces in _BRACES.findall(pattern) for digits in braces if digits]
    return counts


MEAN_POOLING = 1
"""llama.cpp's number for one vector per text, the pooling that weft also sets for llama-server."""
LAYER_SPLIT = 1
"""llama.cpp's number for a split by whole layers."""
CACHE_TYPES: Mapping[str, int] = MappingProxyType(
    {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8}
)
"""ggml's numbers of the types of keys and values."""
LIBRARY_LOGGER = "llama-cpp-python"
_CONTROLLED = frozenset({"self", "tokens", "reset", "logits_processor", "stopping_criteria", "grammar"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of a load."""

    model_path: str
    context_tokens: int
    """0: the model's trained context."""
    threads: int = 1
    gpu_layers: int = -1
    """-1: all, where the library was built for a GPU."""
    batch_tokens: int = 512
    """Tokens per step of prefill, which ends with a report; also the maximum length of an embedded text."""
    embeddings: bool = True
    flash_attention: bool = False
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    """One of CACHE_TYPES; None: the library's default, f16."""
    tensor_split: tuple[float, ...] = ()
    """Parts of the model for each device, by layers; empty: the library's default."""


@dataclass(slots=True)
class _Current:
    """The running request."""

    job: Job
    prompt_total: int = 0
    reports_prefill: bool = False
    usage: Done = field(default_factory=lambda: Done(id=0, prompt_tokens=0))
    """Its end, whose figures grow until it is sent."""


def _send_nothing(message: ToRunner) -> None:
    """The sender of an engine without a request."""


class LlamaCppEngine:
    """A loaded model, see Engine: one request at a time."""

    def __init__(self, library: Any, options: EngineOptions, send: Send) -> None:
        self._library = library
        self._options = options
        self._current = _Current(Job(0, _send_nothing))
        self._llama = self._load(send)
        self._native_eval = self._llama.eval
        self._llama.eval = self._watched_eval
        # The library keeps no reference to the callback, which must live as long as the context. Through it a
        # cancellation ends a prefill within one node of the graph (on a GPU, one batch).
        self._abort = library.llama_cpp.ggml_abort_callback(lambda _: self._current.job.is_cancelled)
        library.llama_cpp.llama_set_abort_callback(self._llama.ctx, self._abort, None)
        self._vocabulary = library.llama_cpp.llama_model_get_vocab(self._llama.model)
        self._known = frozenset(inspect.signature(self._llama.generate).parameters) - _CONTROLLED

    @property
    def context_tokens(self) -> int:
        """Context of prompt and answer together."""
        return int(self._llama.n_ctx())

    @property
    def facts(self) -> Ready:
        """See Engine.facts."""
        return Ready(context_tokens=self.context_tokens)

    def tokenize(self, request: Tokenize, job: Job) -> None:
        """See Engine.tokenize: the vocabulary is only read."""
        ids: list[int] = self._llama.tokenize(request.text.encode(), add_bos=request.add_special, special=True)
        if request.has_template:
            ids = self._with_one_bos(ids)
        pieces = [self._llama.detokenize([token]) for token in ids] if request.with_pieces else []
        job.send(Tokens(id=request.id, ids=ids, pieces=pieces))
        job.send(Done(id=request.id, prompt_tokens=0))

    def work(self, request: Work, job: Job) -> None:
        """See Engine.work."""
        self._current = _Current(job)
        match request:
            case Generate():
                self._generate(request)
            case Embed():
                self._embed(request)
            case Forget():
                job.send(Done(id=request.id, prompt_tokens=self._forget()))
            case _:
                raise RefusedError("UNSUPPORTED_OPERATION", "the memory of this engine is freed by ending it")

    def _load(self, send: Send) -> Any:
        options = self._options
        with _load_progress(self._library.llama_cpp, send):
            llama = self._library.Llama(
                model_path=options.model_path,
                n_ctx=options.context_tokens,
                n_batch=options.batch_tokens,
                n_ubatch=options.batch_tokens,
                n_threads=options.threads,
                n_threads_batch=options.threads,
                n_gpu_layers=options.gpu_layers,
                embedding=options.embeddings,
                **({"pooling_type": MEAN_POOLING} if options.embeddings else {}),
                **_load_settings(options),
            )
        # Its output during a load explains a failure; afterwards it would print lines for every request.
        llama.verbose = False
        logging.getLogger(LIBRARY_LOGGER).setLevel(logging.WARNING)
        return llama

    def _embed(self, request: Embed) -> None:
        if not self._options.embeddings:
            raise RefusedError("UNSUPPORTED_OPERATION", "this model is not configured for embeddings")
        limit = self._llama.n_batch
        for text in request.texts:
            length = len(self._llama.tokenize(text.encode()))
            if not length:
                raise RefusedError("INVALID_ARGUMENT", "a text that is to be embedded has no tokens")
            if length > limit:
                raise RefusedError(
                    "CONTEXT_LENGTH_EXCEEDED", f"a text has {length} tokens; this model embeds at most {limit} at once"
                )
        self._output_embeddings(True)
        began, tokens = time.perf_counter(), 0
        for index, text in enumerate(request.texts):
            self._current.job.raise_if_cancelled()
            vectors, count = self._llama.embed([text], normalize=True, truncate=False, return_count=True)
            tokens += count
            self._current.job.send(Vector(request.id, index, [float(value) for value in vectors[0]]))
        self._current.job.send(Done(id=request.id, prompt_tokens=tokens, prompt_seconds=time.perf_counter() - began))

    def _generate(self, request: Generate) -> None:
        began = time.perf_counter()
        prompts = [self._tokens(prompt, request.has_template) for prompt in request.prompts]
        self._current.usage.tokenize_seconds = time.perf_counter() - began
        for tokens in prompts:
            if len(tokens) >= self.context_tokens:
                raise RefusedError(
                    "CONTEXT_LENGTH_EXCEEDED",
                    f"the prompt has {len(tokens)} tokens; the context of this model has {self.context_tokens}",
                )
        options, grammar = self._sampling(request), self._grammar(request)
        self._output_embeddings(False)
        if request.fresh:
            self._forget()
        seed = random.SystemRandom().getrandbits(31) if request.seed is None else request.seed
        for place, tokens in enumerate(prompts):
            self._current.usage.prompt_tokens += len(tokens)
            for number in range(request.choice_count):
                choice = place * request.choice_count + number
                self._llama.set_seed((seed + choice) % 2**32)
                # Choices of one prompt share it: only the first one's prefill is reported and counted.
                self._current.reports_prefill = number == 0
                if grammar:
                    # A grammar has state: each choice needs a new one.
                    options["grammar"] = self._library.LlamaGrammar.from_string(grammar, verbose=False)
                self._one_choice(request, choice, tokens, options)
        self._current.usage.id = request.id
        self._current.job.send(self._current.usage)

    def _one_choice(self, request: Generate, choice: int, tokens: list[int], options: dict[str, Any]) -> None:
        budget = self.context_tokens - len(tokens)
        limit = budget if request.max_tokens is None else min(request.max_tokens, budget)
        self._current.prompt_total = len(tokens)
        matcher, usage, job = StopMatcher(request.stop), self._current.usage, self._current.job
        began = time.perf_counter()
        generation = self._llama.generate(tokens, **options)
        for count, token in enumerate(generation, start=1):
            job.raise_if_cancelled()
            if count == 1:
                usage.prompt_seconds += time.perf_counter() - began
                began = time.perf_counter()
            usage.completion_tokens += 1
            ended = self._library.llama_cpp.llama_vocab_is_eog(self._vocabulary, token)
            text = "" if ended else matcher.feed(self._llama.detokenize([token]))
            stopped = ended or matcher.stopped
            if stopped or count >= limit:
                job.send(Token(request.id, choice, text + matcher.finish(), "stop" if stopped else "length"))
                break
            job.send(Token(request.id, choice, text))
        generation.close()
        usage.decode_seconds += time.perf_counter() - began

    def _watched_eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens in steps that are reported. The library calls it for a prompt, then for every token."""
        current, llama = self._current, self._llama
        if len(tokens) == 1 and llama.n_tokens >= current.prompt_total:
            self._native_eval(tokens)
            return
        # The library evaluates only the part of the prompt that it has not cached.
        cached = current.prompt_total - len(tokens)
        if current.reports_prefill:
            current.usage.cached_tokens += cached
        for begin in range(0, len(tokens), llama.n_batch):
            current.job.raise_if_cancelled()
            self._native_eval(tokens[begin : begin + llama.n_batch])
            if current.reports_prefill:
                current.job.send(PromptProgress(current.job.id, current.prompt_total, llama.n_tokens, cached))

    def _tokens(self, prompt: str | list[int], has_template: bool) -> list[int]:
        if isinstance(prompt, list):
            vocabulary = self._llama.n_vocab()
            if not prompt or not all(0 <= token < vocabulary for token in prompt):
                raise RefusedError("INVALID_ARGUMENT", f"prompt: token ids must be 0 to {vocabulary - 1}, at least one")
            return prompt
        tokens: list[int] = self._llama.tokenize(prompt.encode(), add_bos=True, special=True)
        return (self._with_one_bos(tokens) if has_template else tokens) or [self._llama.token_bos()]

    def _with_one_bos(self, tokens: list[int]) -> list[int]:
        """Returns the tokens with one BOS token, where both the template and the tokenizer have added one."""
        bos = self._llama.token_bos()
        return tokens[1:] if tokens[:2] == [bos, bos] else tokens

    def _sampling(self, request: Generate) -> dict[str, Any]:
        for name in request.sampling:
            if name not in self._known:
                raise RefusedError("INVALID_ARGUMENT", f"{name}: llama-cpp-python has no such parameter")
        options = dict(request.sampling)
        if request.logit_bias:
            vocabulary = self._llama.n_vocab()
            bias = {token: value for token, value in request.logit_bias.items() if 0 <= token < vocabulary}

            def add_bias(_: Any, scores: Any) -> Any:
                for token, value in bias.items():
                    scores[token] += value
                return scores

            options["logits_processor"] = self._library.LogitsProcessorList([add_bias])
        return options

    def _grammar(self, request: Generate) -> str:
        """Returns the grammar of the answer as GBNF; empty: none. Raises RefusedError for an unusable one."""
        schema = json.dumps({"type": "object"}) if request.json_object else request.json_schema
        if not schema and not request.grammar:
            return ""
        name = "response_format" if schema else "grammar"
        if schema and (why := schema_fault(schema)):
            raise RefusedError("INVALID_ARGUMENT", f"{name}: {why}")
        try:
            text: str = self._library.llama_grammar.json_schema_to_gbnf(schema) if schema else request.grammar
        except Exception as error:
            raise RefusedError("INVALID_ARGUMENT", f"{name}: llama-cpp-python cannot follow this schema") from error
        bindings = self._library.llama_cpp
        # The library does not check whether llama.cpp accepted a grammar, and a refused one ends the process.
        parsed = bindings.llama_sampler_init_grammar(self._vocabulary, text.encode(), b"root")
        if not parsed:
            raise RefusedError("INVALID_ARGUMENT", f"{name}: llama.cpp cannot parse this grammar")
        bindings.llama_sampler_free(parsed)
        return text

    def _output_embeddings(self, wanted: bool) -> None:
        if self._options.embeddings:
            self._library.llama_cpp.llama_set_embeddings(self._llama.ctx, wanted)
            if not wanted:
                return
            self._llama.reset()

    def _forget(self) -> int:
        """Erase the cached prompt; returns its number of tokens."""
        count = int(self._llama.n_tokens)
        self._llama.reset()
        return count


def _load_settings(options: EngineOptions) -> dict[str, Any]:
    """Returns the library's arguments that differ from its defaults."""
    settings: dict[str, Any] = {}
    if options.flash_attention:
        settings["flash_attn"] = True
    if options.cache_type_k is not None:
        settings["type_k"] = CACHE_TYPES[options.cache_type_k]
    if options.cache_type_v is not None:
        settings["type_v"] = CACHE_TYPES[options.cache_type_v]
    if options.tensor_split:
        settings |= {"tensor_split": list(options.tensor_split), "split_mode": LAYER_SPLIT}
    return settings


@contextmanager
def _load_progress(bindings: Any, send: Send) -> Iterator[None]:
    """Report the progress of a load inside; the library has no argument for that."""
    make_defaults = bindings.llama_model_default_params
    reported = [-1.0]

    def report(share: float, _: Any) -> bool:
        if share - reported[0] >= 0.01 or share >= 1.0:
            reported[0] = share
            send(LoadProgress(share))
        return True

    callback = bindings.llama_progress_callback(report)

    def defaults() -> Any:
        parameters = make_defaults()
        parameters.progress_callback = callback
        return parameters

    bindings.llama_model_default_params = defaults
    try:
        yield
    finally:
        bindings.llama_model_default_params = make_defaults
