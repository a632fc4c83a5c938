"""The engine: one model in ExLlamaV3, whose asynchronous generator works on several requests at once.

The generator lives in an event loop in a thread of its own. Each of the host's threads waits there for its request.
"""

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from runner_svc.engine_host.engine import CancelledRequestError, Job, RefusedError, Send, check_prompt
from runner_svc.engine_host.messages import (
    Done,
    Forget,
    Generate,
    LoadProgress,
    PromptProgress,
    Ready,
    Token,
    Tokenize,
    Tokens,
    Work,
)
from runner_svc.engine_host.stop_strings import StopMatcher
from runner_svc.engine_host.token_text import TokenBytes
from runner_svc.runtimes.exllamav3.cache_turns import CacheTurns

CANCEL_CHECK_SECONDS = 0.02
"""Interval in which a request looks whether it was cancelled."""
WAIT_REPORT_SECONDS = 1.0
"""Interval of the reports of a request that waits for those of other tenants while these make progress."""
START_SECONDS = 60.0
"""Time for the generator to start; it allocates little."""
FULL_BITS = 16
MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
MAX_SCHEMA_CHARS = 64 * 1024
_FINISH_REASONS = {"stop_token": "stop", "stop_string": "stop", "end_filter": "stop", "max_new_tokens": "length"}
_SAMPLER = frozenset(
    {
        *("temperature", "top_k", "top_p", "min_p", "rep_p", "freq_p", "pres_p", "temp_last"),
        *("rep_sustain_range", "rep_decay_range", "adaptive_target", "adaptive_decay"),
        *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_range"),
    }
)
_JOB = frozenset({"banned_strings", "min_new_tokens", "token_healing"})
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Libraries:
    """The modules that the engine calls."""

    exllamav3: Any
    torch: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of a load."""

    model_path: Path
    """The folder of the model."""
    context_tokens: int
    cache_tokens: int
    """Tokens of the cache, for all requests together."""
    key_bits: int = FULL_BITS
    value_bits: int = FULL_BITS
    gpu_split: tuple[float, ...] = ()
    """GiB on each device; empty: as the library decides."""
    tensor_parallel: bool = False
    tp_backend: str = "native"
    slots: int = 1
    chunk_tokens: int = 2048
    step_tokens: int = 8
    requeue_tokens: int | None = None
    loop: tuple[int, int] | None = None
    """So many last tokens, and the fewest repeats among them, that make a loop; None: loops are not looked for."""
    shared_cache: bool = False


@dataclass(slots=True)
class _Answering:
    """The work on one request."""

    request: Generate
    job: Job
    usage: Done
    prompts: list[list[int]] = field(default_factory=list)
    has_begun: bool = False
    """Whether it has its turn of the cache."""


class ExllamaV3Engine:
    """A loaded model, see Engine."""

    def __init__(self, libraries: Libraries, options: EngineOptions, send: Send) -> None:
        """Raises RefusedError for a folder that is no model of this library."""
        self._library, self._torch = libraries.exllamav3, libraries.torch
        self._options = options
        self._load(send)
        self._loop = asyncio.new_event_loop()
        self._turns = CacheTurns(self._renew)
        self._generator: Any = None
        self._results = 0
        """Number of the generator's results so far: they show that it works."""
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._run(self._renew(), START_SECONDS)

    @property
    def facts(self) -> Ready:
        """See Engine.facts."""
        # The library keeps room for one token more than a request takes.
        return Ready(
            context_tokens=min(self._options.context_tokens, self._options.cache_tokens - 1), slots=self._options.slots
        )

    def tokenize(self, request: Tokenize, job: Job) -> None:
        """See Engine.tokenize."""
        ids = self._encode(request.text, adds_bos=request.add_special and not request.has_template)
        pieces = [self._bytes_of(token) for token in ids] if request.with_pieces else []
        job.send(Tokens(id=request.id, ids=ids, pieces=pieces))
        job.send(Done(id=request.id, prompt_tokens=0))

    def work(self, request: Work, job: Job) -> None:
        """See Engine.work."""
        match request:
            case Generate():
                self._run(self._watched(request, job))
            case Forget():
                job.send(Done(id=request.id, prompt_tokens=self._run(self._forget())))
            case _:
                raise RefusedError("UNSUPPORTED_OPERATION", "the memory of this engine is freed by ending it")

    def _load(self, send: Send) -> None:
        library, options = self._library, self._options
        try:
            config = library.Config.from_directory(str(options.model_path))
            self._model = library.Model.from_config(config)
        except (AssertionError, OSError, ValueError, KeyError) as error:
            raise RefusedError(
                "INVALID_ARGUMENT", f"{options.model_path} is no model of ExLlamaV3: {error or type(error).__name__}"
            ) from error
        self._tokenizer = library.Tokenizer.from_config(config)
        tokenizer_file = options.model_path / "tokenizer.json"
        if tokenizer_file.stat().st_size > MAX_TOKENIZER_BYTES:
            raise RefusedError("INVALID_ARGUMENT", f"{tokenizer_file} is over {MAX_TOKENIZER_BYTES:,} bytes")
        self._token_bytes = TokenBytes(msgspec.json.decode(tokenizer_file.read_bytes()))
        self._end_tokens: list[int] = list(config.eos_token_id_list)
        bits = {"k_bits": options.key_bits, "v_bits": options.value_bits}
        is_quantized = bits != {"k_bits": FULL_BITS, "v_bits": FULL_BITS}
        # Before the load, which allocates it.
        self._cache = library.Cache(
            self._model,
            max_num_tokens=options.cache_tokens,
            max_batch_size=options.slots,
            layer_type=library.CacheLayer_quant if is_quantized else library.CacheLayer_fp16,
            **(bits if is_quantized else {}),
        )
        steps = self._model.load_gen(
            use_per_device=list(options.gpu_split) or None,
            tensor_p=options.tensor_parallel,
            tp_backend=options.tp_backend,
            max_chunk_size=options.chunk_tokens,
            max_batch_size=options.slots,
        )
        # As the library's own `load`.
        with self._torch.inference_mode():
            for step in steps:
                if step is not None:
                    loaded, total = step
                    send(LoadProgress(loaded / max(total, 1)))

    def _run(self, coroutine: Coroutine[Any, Any, Result], timeout_seconds: float | None = None) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_seconds)

    async def _renew(self) -> None:
        """Replace the generator: a new one knows no pages. Called while no request runs."""
        if self._generator is not None:
            await self._generator.close()
        options = self._options
        self._generator = self._library.AsyncGenerator(
            self._model,
            self._cache,
            self._tokenizer,
            max_batch_size=options.slots,
            max_chunk_size=options.chunk_tokens,
            max_q_size=options.step_tokens,
        )

    async def _forget(self) -> int:
        """Make the engine forget all pages; returns their tokens."""
        held = int(self._generator.generator.get_cache_stats()["cached_tokens"])
        async with self._turns.turn(object()):
            return held

    async def _watched(self, request: Generate, job: Job) -> None:
        """Answer a request until it ends or is cancelled."""
        answering = _Answering(request, job, Done(id=request.id, prompt_tokens=0))
        work = asyncio.ensure_future(self._generate(answering))
        seen, reported = self._results, time.monotonic()
        while not (await asyncio.wait({work}, timeout=CANCEL_CHECK_SECONDS))[0]:
            if job.is_cancelled:
                work.cancel()
            elif not answering.has_begun and time.monotonic() - reported >= WAIT_REPORT_SECONDS:
                reported = time.monotonic()
                if self._results > seen:
                    seen = self._results
                    job.send(PromptProgress(request.id, answering.usage.prompt_tokens, 0, 0))
        self._end_if_broken()
        if work.cancelled():
            raise CancelledRequestError
        work.result()

    def _end_if_broken(self) -> None:
        """End the process after a failure that the generator does not survive; the runner starts it again."""
        if self._generator.error is not None:
            traceback.print_exception(self._generator.error)
            sys.stderr.flush()
            os._exit(1)

    async def _generate(self, answering: _Answering) -> None:
        request, usage = answering.request, answering.usage
        began = time.perf_counter()
        answering.prompts = [self._tokens(prompt, request.has_template) for prompt in request.prompts]
        usage.tokenize_seconds = time.perf_counter() - began
        options = self._job_options(request)
        usage.prompt_tokens = sum(map(len, answering.prompts))
        salt = object() if request.fresh else request.cache_salt
        # Of a cache that all share there is one salt.
        async with self._turns.turn("" if self._options.shared_cache else salt):
            answering.has_begun = True
            for place, tokens in enumerate(answering.prompts):
                for number in range(request.choice_count):
                    choice = place * request.choice_count + number
                    # A filter has state: each choice needs one of its own.
                    filters = await asyncio.to_thread(self._filters, request) if _is_constrained(request) else []
                    await self._one_choice(answering, choice, tokens, {**options, "filters": filters})
        answering.job.send(usage)

    async def _one_choice(self, answering: _Answering, choice: int, tokens: list[int], options: dict[str, Any]) -> None:
        """Generate one answer, send its tokens, and add its counts to the usage of the request."""
        request, job, usage = answering.request, answering.job, answering.usage
        room = self.facts.context_tokens - len(tokens)
        limit = room if request.max_tokens is None else min(request.max_tokens, room)
        matcher = StopMatcher(request.stop)
        seed = None if request.seed is None else request.seed + choice
        results = self._results_of(tokens, {**options, "max_new_tokens": limit, "seed": seed})
        async with aclosing(results):
            async for result in results:
                if result["stage"] == "prefill" and choice % request.choice_count == 0:
                    job.send(PromptProgress(request.id, len(tokens), result["curr_progress"], 0))
                if result["stage"] != "streaming":
                    continue
                text = matcher.feed(result.get("text", "").encode())
                if not result["eos"]:
                    job.send(Token(request.id, choice, text))
                    continue
                usage.completion_tokens += result["new_tokens"]
                usage.prompt_seconds += result["time_prefill"]
                usage.decode_seconds += result["time_generate"]
                if choice % request.choice_count == 0:
                    usage.cached_tokens += result["cached_tokens"]
                job.send(Token(request.id, choice, text + matcher.finish(), self._finish(result, matcher.stopped)))

    def _finish(self, result: dict[str, Any], stopped: bool) -> str:
        """Returns the finish reason of an answer. Raises RefusedError for one that has ended in a loop."""
        reason = result["eos_reason"]
        if reason == "loop_detected" and not stopped:
            window, repeats = self._options.loop or (0, 0)
            message = f"the model repeats itself: its last {window} tokens are at least {repeats} times the same"
            raise RefusedError("REPEATED_LINE_LOOP", message)
        # With the last token allowed the library does not look for a stop string.
        return "stop" if stopped else _FINISH_REASONS.get(reason, "stop")

    async def _results_of(self, tokens: list[int], options: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Yields the results of a job; closing frees its pages at once. Raises RefusedError."""
        ids = self._torch.tensor([tokens], dtype=self._torch.long)
        try:
            running = self._library.AsyncJob(self._generator, input_ids=ids, **options)
        except (AssertionError, ValueError) as error:
            raise RefusedError("INVALID_ARGUMENT", f"ExLlamaV3 refuses the request: {error}") from error
        ended = False
        try:
            async with aclosing(aiter(running)) as results:
                async for result in results:
                    self._results += 1
                    ended = bool(result["eos"])
                    yield result
        finally:
            if not ended:
                await running.cancel()

    def _job_options(self, request: Generate) -> dict[str, Any]:
        """Returns the library's arguments for the parameters of a request. Raises RefusedError."""
        given = request.sampling
        for name in given:
            if name not in _SAMPLER | _JOB:
                raise RefusedError("INVALID_ARGUMENT", f"{name}: ExLlamaV3 has no such parameter")
        if given.get("rep_p", 1.0) <= 0:
            raise RefusedError("INVALID_ARGUMENT", "rep_p: must be above 0; 1 has no effect")
        sampling = {name: value for name, value in given.items() if name in _SAMPLER}
        if "top_k" in sampling:
            sampling["top_k"] = max(sampling["top_k"], 0)
        vocabulary = self._tokenizer.actual_vocab_size
        bias = {token: value for token, value in request.logit_bias.items() if 0 <= token < vocabulary}
        # Without any of them the library's own defaults hold.
        sampler = self._library.ComboSampler(**sampling, logit_bias=bias or None) if sampling or bias else None
        return {
            "sampler": sampler,
            "stop_conditions": [*self._end_tokens, *filter(None, request.stop)],
            "max_rq_tokens": self._options.requeue_tokens,
            "stop_on_loop": self._options.loop if request.ends_loops else None,
            **{name: value for name, value in given.items() if name in _JOB},
        }

    def _filters(self, request: Generate) -> list[Any]:
        """Returns what constrains an answer. Raises RefusedError for a grammar that the library refuses."""
        if request.json_object:
            source: dict[str, Any] = {"json_schema": {"type": "object"}}
        elif request.json_schema:
            source = {"json_schema": request.json_schema}
        else:
            source = {"gbnf_grammar": request.grammar}
        name = "grammar" if request.grammar else "response_format"
        if len(request.json_schema) > MAX_SCHEMA_CHARS:
            raise RefusedError("INVALID_ARGUMENT", f"{name}: must be at most {MAX_SCHEMA_CHARS:,} characters")
        try:
            return [self._library.LLGuidanceFilter(self._tokenizer, eos_after_completed=True, **source)]
        except (ValueError, RuntimeError) as error:
            raise RefusedError("INVALID_ARGUMENT", f"{name}: {error}") from error

    def _tokens(self, prompt: str | list[int], has_template: bool) -> list[int]:
        # A template begins with the first token itself, where the model has one.
        tokens = self._encode(prompt, adds_bos=not has_template) if isinstance(prompt, str) else prompt
        check_prompt(tokens, self._tokenizer.actual_vocab_size, self.facts.context_tokens)
        return tokens

    def _encode(self, text: str, *, adds_bos: bool) -> list[int]:
        config = self._tokenizer.tokenizer_config_dict or {}
        # The library would add one to every model that has one, also where the tokenizer adds none.
        encoded = self._tokenizer.encode(
            text, add_bos=adds_bos and config.get("add_bos_token", True) is not False, encode_special_tokens=True
        )
        ids: list[int] = encoded[0].tolist()
        return ids

    def _bytes_of(self, token: int) -> bytes:
        written = self._tokenizer.tokenizer.id_to_token(token)
        return b"" if written is None else self._token_bytes.of(written)


def _is_constrained(request: Generate) -> bool:
    return bool(request.json_object or request.json_schema or request.grammar)
