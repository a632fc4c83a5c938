"""The engine: one model in vLLM's AsyncLLM, which works on several requests at once.

AsyncLLM lives in an event loop in a thread of its own; the model is computed by processes that it starts. Each of the
host's threads tokenizes the prompts of its request, and waits until the event loop has answered it.
"""

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import CancelledError
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from runner_svc.engine_host.engine import CancelledRequestError, Job, RefusedError, Send, check_prompt
from runner_svc.engine_host.messages import (
    ChatTemplates,
    Done,
    Embed,
    EngineFigures,
    EngineMetrics,
    Forget,
    Generate,
    Ready,
    Sleep,
    Token,
    Tokenize,
    Tokens,
    Vector,
    Wake,
    Work,
)
from runner_svc.engine_host.token_text import TokenBytes
from runner_svc.runtimes.vllm.figures import StepStatistics

HEALTH_CHECK_SECONDS = 0.5
"""Interval in which a dead engine is noticed while there is no request."""
FIGURES_SECONDS = 1.0
"""Shortest interval of the engine's figures."""
METRICS_SECONDS = 5.0
"""Shortest interval of its metrics."""
RESET_TRIES = 10
RESET_PAUSE_SECONDS = 0.2
"""The cache is emptied only while no request uses it; what an ended request used is freed a little later."""
LEVEL_WITHOUT_WEIGHTS = 2
FIRST_ADAPTER_ID = 1
TOOL_USE = "tool_use"
_STRUCTURED = "structured_outputs"
_TRUNCATED = "truncate_prompt_tokens"
_FINISH_REASONS = {"stop": "stop", "length": "length"}
_OURS = frozenset(
    {
        *("n", "seed", "stop", "max_tokens", "logit_bias", "output_kind", "skip_reading_prefix_cache"),
        *("skip_clone", "detokenize", "output_text_buffer_length", "extra_args", "stream_interval"),
        *("logprobs", "prompt_logprobs", "flat_logprobs"),
    }
)
"""Parameters that no request sets by itself: weft does, or they would change the form of the answer."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Libraries:
    """The modules that the engine calls."""

    arguments: Any
    parser: Any
    engine: Any
    sampling: Any
    pooling: Any
    lora: Any
    exceptions: Any
    engine_exceptions: Any
    metrics: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of a load beside vLLM's own."""

    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters by name; that of requests which name none has the empty name."""
    sleep_level: int = 1


@dataclass(slots=True)
class _Answering:
    """The work on one request."""

    request: Generate
    job: Job
    usage: Done


class VllmEngine:
    """A loaded model, see Engine."""

    def __init__(self, libraries: Libraries, arguments: Any, options: EngineOptions, send: Send) -> None:
        """Raises RefusedError for arguments that vLLM refuses."""
        self._library, self._options, self._send = libraries, options, send
        self._statistics = StepStatistics(self._schedule_figures)
        self._figures: EngineFigures | None = None
        self._figures_timer: asyncio.TimerHandle | None = None
        self._metrics_timer: asyncio.TimerHandle | None = None
        self._tokenizing = threading.Lock()
        self._number = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()
        self._engine = self._run(self._load(arguments))
        config = self._engine.model_config
        self._context_tokens: int = config.max_model_len
        self._vocabulary: int = config.get_vocab_size()
        self._defaults: dict[str, Any] = config.get_diff_sampling_param()
        """Sampling parameters of the model's own, where a request has none."""
        self._tokenizer = self._engine.get_tokenizer()
        self._token_bytes: TokenBytes | None = None
        self._adapters = {
            name: libraries.lora.LoRARequest(name or "adapter", number, path)
            for number, (name, path) in enumerate(options.adapters.items(), FIRST_ADAPTER_ID)
        }
        self._model = str(arguments.model)
        self._watching = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)
        # The memory of its cache is known before its first request.
        self._loop.call_soon_threadsafe(self._schedule_figures)

    @property
    def facts(self) -> Ready:
        """See Engine.facts."""
        return Ready(
            context_tokens=self._context_tokens,
            slots=int(self._engine.vllm_config.scheduler_config.max_num_seqs),
            templates=None if Path(self._model).is_dir() else self._templates(),
        )

    def tokenize(self, request: Tokenize, job: Job) -> None:
        """See Engine.tokenize."""
        ids = self._encode(request.text, adds_special=request.add_special and not request.has_template)
        pieces = self._pieces(ids) if request.with_pieces else []
        job.send(Tokens(id=request.id, ids=ids, pieces=pieces))
        job.send(Done(id=request.id, prompt_tokens=0))

    def work(self, request: Work, job: Job) -> None:
        """See Engine.work."""
        match request:
            case Generate():
                self._generate(request, job)
            case Embed():
                prompts = [self._prompt(text, has_template=False) for text in request.texts]
                self._run_for(job, self._embed(request.id, job, prompts))
            case Forget():
                self._run_for(job, self._forget())
                job.send(Done(id=request.id, prompt_tokens=0))
            case Sleep():
                self._run(self._engine.sleep(level=self._options.sleep_level))
                job.send(Done(id=request.id, prompt_tokens=0))
            case Wake():
                self._run(self._wake())
                job.send(Done(id=request.id, prompt_tokens=0))

    async def _load(self, arguments: Any) -> Any:
        def statistics_of(_config: Any, _engine_index: int) -> StepStatistics:
            return self._statistics

        try:
            return self._library.engine.AsyncLLM.from_engine_args(arguments, stat_loggers=[statistics_of])
        except ValueError as error:
            raise RefusedError("INVALID_ARGUMENT", f"vLLM refuses the load: {_in_one_line(error)}") from error

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _run_for(self, job: Job, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Returns the result of the work on a request, which ends early once it is cancelled."""
        working = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        job.when_cancelled(working.cancel)
        try:
            return working.result()
        except CancelledError:
            raise CancelledRequestError from None
        except self._library.engine_exceptions.EngineDeadError as error:
            _end_process(error)
        except self._library.exceptions.VLLMClientError as error:
            raise RefusedError("INVALID_ARGUMENT", f"vLLM refuses the request: {_in_one_line(error)}") from error
        except self._library.engine_exceptions.EngineGenerateError as error:
            if isinstance(error.__cause__, (ValueError, TypeError)):
                message = f"vLLM refuses the request: {_in_one_line(error.__cause__)}"
                raise RefusedError("INVALID_ARGUMENT", message) from error
            raise RuntimeError(_in_one_line(error.__cause__ or error)) from error

    def _generate(self, request: Generate, job: Job) -> None:
        began = time.monotonic()
        limit = request.sampling.pop(_TRUNCATED, None)
        prompts = [self._prompt(prompt, request.has_template, limit) for prompt in request.prompts]
        usage = Done(id=request.id, prompt_tokens=sum(map(len, prompts)))
        usage.tokenize_seconds = time.monotonic() - began
        answering = _Answering(request, job, usage)
        sampling = [self._sampling(request, len(prompt)) for prompt in prompts]
        self._run_for(job, self._answer(answering, prompts, sampling))
        job.send(usage)

    async def _answer(self, answering: _Answering, prompts: list[list[int]], sampling: list[Any]) -> None:
        """Answer every prompt of a request, side by side."""
        pairs = zip(prompts, sampling, strict=True)
        await _together(self._answer_one(answering, place, *pair) for place, pair in enumerate(pairs))

    async def _answer_one(self, answering: _Answering, place: int, prompt: list[int], sampling: Any) -> None:
        """Answer one prompt. Cancelling this aborts its requests in the engine."""
        request, usage, send = answering.request, answering.usage, answering.job.send
        given: dict[str, Any] = {"prompt_token_ids": prompt}
        if request.cache_salt:
            given["cache_salt"] = request.cache_salt
        adapter = self._adapters.get(request.adapter)
        first = place * request.choice_count
        cached = 0
        outputs = self._engine.generate(given, sampling, self._next_id(), lora_request=adapter)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    cached = max(cached, output.num_cached_tokens or 0)
                    for choice in output.outputs:
                        usage.completion_tokens += len(choice.token_ids)
                        reason = choice.finish_reason
                        if reason is not None:
                            _add_times(usage, output.metrics)
                            reason = _finish(reason)
                        send(Token(request.id, first + choice.index, choice.text, reason or ""))
        finally:
            self._schedule_figures()
        usage.cached_tokens += cached

    async def _embed(self, number: int, job: Job, prompts: list[list[int]]) -> None:
        params = self._library.pooling.PoolingParams(task="embed")

        async def embed(place: int, prompt: list[int]) -> None:
            async for output in self._engine.encode({"prompt_token_ids": prompt}, params, self._next_id()):
                job.send(Vector(number, place, output.outputs.data.float().tolist()))

        await _together(embed(place, prompt) for place, prompt in enumerate(prompts))
        job.send(Done(id=number, prompt_tokens=sum(map(len, prompts))))

    async def _forget(self) -> None:
        for tries_left in reversed(range(RESET_TRIES)):
            if await self._engine.reset_prefix_cache():
                return
            if tries_left:
                await asyncio.sleep(RESET_PAUSE_SECONDS)
        raise RefusedError("BACKEND_ERROR", "vLLM did not empty its cache, because requests use it")

    async def _wake(self) -> None:
        if self._options.sleep_level == LEVEL_WITHOUT_WEIGHTS:
            await self._engine.wake_up(tags=["weights"])
            await self._engine.collective_rpc("reload_weights")
            await self._engine.wake_up(tags=["kv_cache"])
        else:
            await self._engine.wake_up()
        await self._engine.check_health()
        if await self._engine.is_sleeping():
            raise RefusedError("BACKEND_ERROR", "vLLM still sleeps")

    async def _watch(self) -> None:
        """End this process once the engine is dead: the runner starts it again."""
        dead = self._library.engine_exceptions.EngineDeadError
        while True:
            try:
                await self._engine.check_health()
            except dead as error:
                _end_process(error)
            await asyncio.sleep(HEALTH_CHECK_SECONDS)

    def _next_id(self) -> str:
        self._number += 1
        return f"weft-{self._number}"

    def _schedule_figures(self) -> None:
        """Send the figures and the metrics soon, unless that is under way."""
        if self._figures_timer is None:
            self._figures_timer = self._loop.call_later(FIGURES_SECONDS, self._send_figures)
        if self._metrics_timer is None:
            self._metrics_timer = self._loop.call_later(METRICS_SECONDS, self._send_metrics)

    def _send_figures(self) -> None:
        self._figures_timer = None
        cache = self._engine.vllm_config.cache_config
        figures = self._statistics.figures(
            has_requests=self._engine.get_num_unfinished_requests() > 0,
            kv_cache_tokens=cache.kv_cache_size_tokens or (cache.num_gpu_blocks or 0) * (cache.block_size or 0) or None,
            kv_cache_bytes=self._cache_bytes(),
        )
        if figures != self._figures:
            self._figures = figures
            self._send(figures)

    def _cache_bytes(self) -> int | None:
        """Returns the size of the KV cache on all devices where it was set in bytes; None: unknown."""
        config = self._engine.vllm_config
        size = config.cache_config.kv_cache_memory_bytes
        return None if size is None else size * config.parallel_config.world_size

    def _send_metrics(self) -> None:
        self._metrics_timer = None
        # vLLM registers its metrics there, beside the loggers that it is given.
        self._send(EngineMetrics(self._library.metrics.generate_latest().decode()))

    def _sampling(self, request: Generate, prompt_tokens: int) -> Any:
        """Returns vLLM's parameters for one prompt. Raises RefusedError."""
        known = set(self._library.sampling.SamplingParams.__struct_fields__) - _OURS
        given = {**self._defaults, **request.sampling}
        given.pop("max_tokens", None)
        for name in given:
            if name not in known or name.startswith("_"):
                raise RefusedError("INVALID_ARGUMENT", f"{name}: vLLM has no such parameter")
        room = self._context_tokens - prompt_tokens
        wanted = request.max_tokens or self._defaults.get("max_tokens") or room
        try:
            if (structured := self._structured(request, given.pop(_STRUCTURED, None))) is not None:
                given[_STRUCTURED] = structured
            return self._library.sampling.SamplingParams(
                n=request.choice_count,
                seed=request.seed,
                stop=[text for text in request.stop if text] or None,
                max_tokens=min(wanted, room),
                logit_bias=request.logit_bias or None,
                output_kind=self._library.sampling.RequestOutputKind.DELTA,
                skip_reading_prefix_cache=True if request.fresh else None,
                **given,
            )
        except (ValueError, TypeError, self._library.exceptions.VLLMClientError) as error:
            raise RefusedError("INVALID_ARGUMENT", f"vLLM refuses the request: {_in_one_line(error)}") from error

    def _structured(self, request: Generate, extra: Any) -> Any:
        """Returns what constrains an answer; None: nothing does. Raises RefusedError, or as vLLM."""
        found: list[dict[str, Any]] = []
        if request.json_object:
            found.append({"json_object": True})
        if request.json_schema:
            found.append({"json": request.json_schema})
        if request.grammar:
            found.append({"grammar": request.grammar})
        if extra:
            found.append({name: value for name, value in dict(extra).items() if not name.startswith("_")})
        if len(found) > 1:
            raise RefusedError("INVALID_ARGUMENT", f"{_STRUCTURED}: cannot go with a response format or a grammar")
        return self._library.sampling.StructuredOutputsParams(**found[0]) if found else None

    def _prompt(self, prompt: str | list[int], has_template: bool, most_tokens: int | None = None) -> list[int]:
        """Returns the tokens of a prompt, at most its last so many; -1: as many as the context has room for."""
        tokens = self._encode(prompt, adds_special=not has_template) if isinstance(prompt, str) else prompt
        if most_tokens is not None and most_tokens != 0:
            tokens = tokens[-(most_tokens if most_tokens > 0 else self._context_tokens - 1) :]
        check_prompt(tokens, self._vocabulary, self._context_tokens)
        return tokens

    def _encode(self, text: str, *, adds_special: bool) -> list[int]:
        with self._tokenizing:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=adds_special)
        return ids

    def _pieces(self, ids: list[int]) -> list[bytes]:
        """Returns the bytes of each token."""
        with self._tokenizing:
            if self._token_bytes is None:
                self._token_bytes = TokenBytes(msgspec.json.decode(self._tokenizer.backend_tokenizer.to_str()))
            token_bytes = self._token_bytes
            return [token_bytes.of(token) for token in self._tokenizer.convert_ids_to_tokens(ids)]

    def _templates(self) -> ChatTemplates:
        """Returns the templates of a model of the hub, by its tokenizer."""
        found = getattr(self._tokenizer, "chat_template", None)
        named = found if isinstance(found, dict) else {"default": found}
        return ChatTemplates(
            usual=named.get("default"),
            tool_use=named.get(TOOL_USE),
            bos_token=getattr(self._tokenizer, "bos_token", None) or "",
            eos_token=getattr(self._tokenizer, "eos_token", None) or "",
        )


async def _together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do some work side by side. The first failure ends all of it."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _add_times(usage: Done, metrics: Any) -> None:
    """Add the times of a choice that has ended, by the clock of the engine's process."""
    if metrics is None or not (metrics.scheduled_ts and metrics.first_token_ts and metrics.last_token_ts):
        usage.is_undivided = True
        return
    usage.prompt_seconds += max(0.0, metrics.first_token_ts - metrics.scheduled_ts)
    usage.decode_seconds += max(0.0, metrics.last_token_ts - metrics.first_token_ts)


def _finish(reason: str) -> str:
    """Returns the reason why a choice ended. Raises RefusedError for one that did not end by itself."""
    if reason not in _FINISH_REASONS:
        raise RefusedError("BACKEND_ERROR", f"vLLM ended the answer: {reason}")
    return _FINISH_REASONS[reason]


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _end_process(error: BaseException) -> NoReturn:
    """End this process; the runner starts another one. Its own processes are ended by the runner."""
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)
