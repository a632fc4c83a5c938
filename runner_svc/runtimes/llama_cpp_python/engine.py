"""The engine: one model in llama-cpp-python, through the library's public calls, one request at a time.

`create_completion` is not used: it hides the number of tokens, and its prefill can be neither observed nor ended.
"""

import codecs
import inspect
import json
import logging
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from runner_svc.runtimes.llama_cpp_python.messages import (
    Done,
    Embed,
    Failed,
    Forget,
    Generate,
    LoadProgress,
    PromptProgress,
    Token,
    Tokenize,
    Tokens,
    TooLongError,
    ToRunner,
    Vector,
    Work,
)

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


class StopMatcher:
    """Finds stop strings in the bytes of the tokens, and returns the text that can be shown.

    It holds back the bytes of an incomplete character, and text that a stop string may begin with.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(text for text in stop if text)
        self._longest = max(map(len, self._stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False
        """Whether a stop string was found; it and the text after it are never shown."""

    def feed(self, piece: bytes) -> str:
        """Returns the text that can be shown after these bytes."""
        return self._show(self._decoder.decode(piece))

    def finish(self) -> str:
        """Returns the text that was held back, at the end of the generation."""
        shown = self._show(self._decoder.decode(b"", final=True))
        rest, self._held = ("" if self.stopped else self._held), ""
        return shown + rest

    def _show(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [place for place in map(text.find, self._stop) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _undecided(self, text: str) -> int:
        """Returns the length of the longest end of `text` that a stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


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

Send = Callable[[ToRunner], None]


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


class RefusedError(Exception):
    """An invalid request; `reason` is the name of a `Reason`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class CancelledRequestError(Exception):
    """The running request was cancelled."""


@dataclass(slots=True)
class _Current:
    """The running request."""

    id: int = 0
    prompt_total: int = 0
    reports_prefill: bool = False
    usage: Done = field(default_factory=lambda: Done(id=0, prompt_tokens=0))
    """Its end, whose figures grow until it is sent."""


class LlamaCppEngine:
    """A loaded model. All calls come from one thread, except `cancel` and `tokenize`."""

    def __init__(self, library: Any, options: EngineOptions, send: Send) -> None:
        self._library = library
        self._options = options
        self._send = send
        self._current = _Current()
        self._cancelled: set[int] = set()
        self._last_id = 0
        self._llama = self._load()
        self._native_eval = self._llama.eval
        self._llama.eval = self._watched_eval
        # The library keeps no reference to the callback, which must live as long as the context.
        self._abort = library.llama_cpp.ggml_abort_callback(lambda _: self._current.id in self._cancelled)
        library.llama_cpp.llama_set_abort_callback(self._llama.ctx, self._abort, None)
        self._vocabulary = library.llama_cpp.llama_model_get_vocab(self._llama.model)
        self._known = frozenset(inspect.signature(self._llama.generate).parameters) - _CONTROLLED

    @property
    def context_tokens(self) -> int:
        """Context of prompt and answer together."""
        return int(self._llama.n_ctx())

    def cancel(self, request_id: int) -> None:
        """Cancel a request, from any thread.

        It ends between two tokens or, in prefill, within one node of the graph (on a GPU, one batch).
        """
        if request_id > self._last_id:
            self._cancelled.add(request_id)

    def tokenize(self, request: Tokenize) -> None:
        """Tokenize a text, and report Done or Failed. Called from another thread: the vocabulary is only read."""
        try:
            ids: list[int] = self._llama.tokenize(request.text.encode(), add_bos=request.add_special, special=True)
            if request.has_template:
                ids = self._with_one_bos(ids)
            pieces = [self._llama.detokenize([token]) for token in ids] if request.with_pieces else []
            self._send(Tokens(id=request.id, ids=ids, pieces=pieces))
            self._send(Done(id=request.id, prompt_tokens=0))
        except BrokenPipeError:
            raise
        except TooLongError:
            self._send(Failed(request.id, "INVALID_ARGUMENT", "the text has too many tokens to tell them all"))
        except Exception as error:
            self._send(Failed(request.id, "BACKEND_ERROR", f"the engine failed: {error}"))
            raise
        finally:
            self._cancelled.discard(request.id)

    def work(self, request: Work) -> None:
        """Works on a request until it ends, and reports Done or Failed; nothing if it was cancelled."""
        self._current = _Current(id=request.id)
        try:
            match request:
                case Generate():
                    self._generate(request)
                case Embed():
                    self._embed(request)
                case Forget():
                    self._send(Done(id=request.id, prompt_tokens=self._forget()))
        except CancelledRequestError:
            pass
        except RefusedError as refusal:
            self._send(Failed(request.id, refusal.reason, str(refusal)))
        except Exception as error:
            if request.id not in self._cancelled:
                self._send(Failed(request.id, "BACKEND_ERROR", f"the engine failed: {error}"))
                raise
        finally:
            self._last_id = request.id
            self._cancelled.discard(request.id)

    def _load(self) -> Any:
        options = self._options
        with _load_progress(self._library.llama_cpp, self._send):
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
            self._raise_if_cancelled()
            vectors, count = self._llama.embed([text], normalize=True, truncate=False, return_count=True)
            tokens += count
            self._send(Vector(request.id, index, [float(value) for value in vectors[0]]))
        self._send(Done(id=request.id, prompt_tokens=tokens, prompt_seconds=time.perf_counter() - began))

    def _generate(self, request: Generate) -> None:
        prompts = [self._tokens(prompt, request.has_template) for prompt in request.prompts]
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
        self._send(self._current.usage)

    def _one_choice(self, request: Generate, choice: int, tokens: list[int], options: dict[str, Any]) -> None:
        budget = self.context_tokens - len(tokens)
        limit = budget if request.max_tokens is None else min(request.max_tokens, budget)
        self._current.prompt_total = len(tokens)
        matcher, usage, began = StopMatcher(request.stop), self._current.usage, time.perf_counter()
        generation = self._llama.generate(tokens, **options)
        for count, token in enumerate(generation, start=1):
            self._raise_if_cancelled()
            if count == 1:
                usage.prompt_seconds += time.perf_counter() - began
                began = time.perf_counter()
            usage.completion_tokens += 1
            ended = self._library.llama_cpp.llama_vocab_is_eog(self._vocabulary, token)
            text = "" if ended else matcher.feed(self._llama.detokenize([token]))
            stopped = ended or matcher.stopped
            if stopped or count >= limit:
                self._send(Token(request.id, choice, text + matcher.finish(), "stop" if stopped else "length"))
                break
            self._send(Token(request.id, choice, text))
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
            self._raise_if_cancelled()
            self._native_eval(tokens[begin : begin + llama.n_batch])
            if current.reports_prefill:
                self._send(PromptProgress(current.id, current.prompt_total, llama.n_tokens, cached))

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

    def _raise_if_cancelled(self) -> None:
        if self._current.id in self._cancelled:
            raise CancelledRequestError


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
