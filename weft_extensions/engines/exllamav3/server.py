"""The server program of ExLlamaV3.

PYTHON .../weft_extensions/engines/engine_host/bootstrap.py weft_extensions.engines.exllamav3.server --model FOLDER
"""

import argparse
import asyncio
import concurrent.futures
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from weft_extensions.engines.engine_host.http_server import (
    Caller,
    LoadReports,
    RefusedError,
    import_library,
    numbers,
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
    send_choice,
    send_progress,
    send_usage,
    token_limit,
)
from weft_extensions.engines.exllamav3.cache_turns import CacheTurns
from weft_extensions.engines.exllamav3.jobs import Jobs

CANCEL_CHECK_SECONDS = 0.02
"""Interval between checks whether a caller has disconnected."""
WAIT_REPORT_SECONDS = 1.0
"""Interval between reports of a request that waits for other tenants' requests while these make progress."""
START_SECONDS = 60.0
"""Timeout for starting the generator, which allocates little."""
FULL_BITS = 16
Result = TypeVar("Result")


@dataclass(slots=True)
class _Answering:
    body: dict[str, Any]
    caller: Caller
    prompts: list[list[int]]
    usage: Usage
    count: int
    """Choices per prompt."""
    options: dict[str, Any]
    """The library's arguments for its parameters."""
    matchers: dict[int, StopMatcher] = field(default_factory=dict)
    """Stop string matchers by choice."""
    results: queue.SimpleQueue[tuple[int, dict[str, Any]]] = field(default_factory=queue.SimpleQueue)
    """The generator's results with the index of their choice."""
    has_begun: bool = False
    """Whether it was admitted to the cache."""


class ExllamaV3Engine(TextEngine):
    """A loaded model, see Engine."""

    def __init__(self, library: Any, torch: Any, options: argparse.Namespace) -> None:
        """`library` and `torch` are modules. Raises RefusedError for a folder without a model of the library."""
        self._library, self._torch = library, torch
        self._options = options
        # The library reserves one more token than a request uses.
        self.context_tokens, self.slots = min(options.context_tokens, options.cache_tokens - 1), options.slots
        self._load()
        self._loop = asyncio.new_event_loop()
        self._turns = CacheTurns(self._renew)
        self._generator: Any = None
        self._results = 0
        """Number of results so far; shows that the generator is making progress."""
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._run(self._renew(), START_SECONDS)

    def tokens_of(self, text: str, *, add_special: bool) -> list[int]:
        """See Engine.tokens_of."""
        config = self._tokenizer.tokenizer_config_dict or {}
        # Otherwise the library would add a begin token to every model that has one, even if the tokenizer adds none.
        encoded = self._tokenizer.encode(
            text, add_bos=add_special and config.get("add_bos_token", True) is not False, encode_special_tokens=True
        )
        return list(encoded[0].tolist())

    def piece_of(self, token: int) -> bytes:
        """See Engine.piece_of."""
        written = self._tokenizer.tokenizer.id_to_token(token)
        return b"" if written is None else self._token_bytes.of(written)

    def forget(self) -> int:
        """See Engine.forget."""
        return self._run(self._forget())

    def complete(self, body: dict[str, Any], caller: Caller) -> None:
        """See Engine.complete."""
        prompts, usage = self.read_prompts(body)
        answering = _Answering(body, caller, prompts, usage, body.get("n") or 1, self._jobs.of(body))
        work = asyncio.run_coroutine_threadsafe(self._generate(answering), self._loop)
        try:
            self._send_results(answering, work)
            self._end_if_broken()
            work.result()
        finally:
            work.cancel()
        send_usage(caller, usage)

    def _send_results(self, answering: _Answering, work: concurrent.futures.Future[None]) -> None:
        """Sends the generator's results for a request until its work has ended."""
        seen, reported, caller = self._results, time.monotonic(), answering.caller
        while True:
            caller.raise_if_gone()
            over = work.done()
            try:
                self._send_result(answering, *answering.results.get(timeout=0 if over else CANCEL_CHECK_SECONDS))
                continue
            except queue.Empty:
                if over:
                    return
            if not answering.has_begun and time.monotonic() - reported >= WAIT_REPORT_SECONDS:
                reported = time.monotonic()
                if self._results > seen:
                    seen = self._results
                    send_progress(caller, answering.usage.prompt_tokens, 0)

    def _send_result(self, answering: _Answering, choice: int, result: dict[str, Any]) -> None:
        caller, usage = answering.caller, answering.usage
        is_first = choice % answering.count == 0
        if result["stage"] == "prefill" and is_first:
            send_progress(caller, len(answering.prompts[choice // answering.count]), result["curr_progress"])
        if result["stage"] != "streaming":
            return
        matcher = answering.matchers.setdefault(choice, StopMatcher(answering.body.get("stop") or ()))
        text = matcher.feed(result.get("text", "").encode())
        if not result["eos"]:
            send_choice(caller, choice, text, None)
            return
        usage.completion_tokens += result["new_tokens"]
        usage.prompt_seconds += result["time_prefill"]
        usage.decode_seconds += result["time_generate"]
        usage.cached_tokens += result["cached_tokens"] if is_first else 0
        send_choice(caller, choice, text + matcher.finish(), self._jobs.finish_reason(result, matcher.stopped))

    def _load(self) -> None:
        library, options = self._library, self._options
        try:
            config = library.Config.from_directory(str(options.model))
            self._model = library.Model.from_config(config)
        except (AssertionError, OSError, ValueError, KeyError) as error:
            raise RefusedError(
                f"{options.model} is not a model of ExLlamaV3: {error or type(error).__name__}"
            ) from error
        self._tokenizer = library.Tokenizer.from_config(config)
        tokenizer = json_file(options.model / "tokenizer.json")
        if not tokenizer:
            raise RefusedError(f"{options.model} has no tokenizer.json")
        self._token_bytes = TokenBytes(tokenizer)
        self._jobs = Jobs(library, self._tokenizer, list(config.eos_token_id_list), options)
        bits = {"k_bits": options.key_bits, "v_bits": options.value_bits}
        is_quantized = bits != {"k_bits": FULL_BITS, "v_bits": FULL_BITS}
        # Before the load, which allocates the cache.
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
        reports = LoadReports()
        # As in the library's `load`.
        with self._torch.inference_mode():
            for step in steps:
                if step is not None:
                    reports.report(step[0] / max(step[1], 1))

    def _run(self, coroutine: Coroutine[Any, Any, Result], timeout_seconds: float | None = None) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_seconds)

    async def _renew(self) -> None:
        """Replaces the generator, which drops all pages. Called while no request is running."""
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
        """Makes the engine drop all pages; returns their number of tokens."""
        held = int(self._generator.generator.get_cache_stats()["cached_tokens"])
        async with self._turns.turn(object()):
            return held

    def _end_if_broken(self) -> None:
        """Ends the process after a failure that breaks the generator; the runner restarts it."""
        if self._generator.error is not None:
            traceback.print_exception(self._generator.error)
            sys.stderr.flush()
            os._exit(1)

    async def _generate(self, answering: _Answering) -> None:
        """Generates the answers to a request one after the other."""
        body = answering.body
        salt = object() if body.get("cache_prompt") is False else body.get("cache_salt", "")
        # Without isolation all requests have the same salt.
        async with self._turns.turn(salt):
            answering.has_begun = True
            for choice in range(len(answering.prompts) * answering.count):
                tokens = answering.prompts[choice // answering.count]
                # A filter has state, so each choice needs its own.
                filters = await asyncio.to_thread(self._jobs.filters, body)
                seed = None if body.get("seed") is None else body["seed"] + choice
                limit = token_limit(body, len(tokens), self.context_tokens)
                options = {**answering.options, "filters": filters, "max_new_tokens": limit, "seed": seed}
                async with aclosing(self._results_of(tokens, options)) as results:
                    async for result in results:
                        answering.results.put((choice, result))

    async def _results_of(self, tokens: list[int], options: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Yields the results of a job; closing frees its pages immediately. Raises RefusedError."""
        ids = self._torch.tensor([tokens], dtype=self._torch.long)
        try:
            running = self._library.AsyncJob(self._generator, input_ids=ids, **options)
        except (AssertionError, ValueError) as error:
            raise RefusedError(f"ExLlamaV3 refuses the request: {error}") from error
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

    def prompt_of(self, prompt: str | list[int], *, add_special: bool) -> list[int]:
        """See TextEngine.prompt_of."""
        tokens = self.tokens_of(prompt, add_special=add_special) if isinstance(prompt, str) else prompt
        check_prompt(tokens, self.context_tokens, self._tokenizer.actual_vocab_size)
        return tokens


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags of this program."""
    parser = program_parser("exllamav3_server", __doc__)
    for name, default in (("context-tokens", 2048), ("cache-tokens", 2304), ("chunk-tokens", 2048), ("step-tokens", 8)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    for name in ("key-bits", "value-bits"):
        parser.add_argument(f"--{name}", type=positive, default=FULL_BITS)
    parser.add_argument("--gpu-split", type=numbers, default=(), help="GiB on each device, separated by commas")
    parser.add_argument("--tensor-parallel", action="store_true")
    parser.add_argument("--tp-backend", choices=["native", "nccl"], default="native")
    parser.add_argument("--requeue-tokens", type=int, default=0, help="0: none are queued again")
    parser.add_argument("--loop-tokens", type=int, default=4096, help="repeats that end an answer; 0: never")
    parser.add_argument("--loop-repeats", type=positive, default=16, help="fewest repeats among these tokens")
    return parser.parse_args(argv)


def load(options: argparse.Namespace) -> ExllamaV3Engine:
    """Loads the model. Raises ImportError, RefusedError."""
    torch, library = import_library("torch"), import_library("exllamav3")
    if not torch.cuda.is_available():
        raise ImportError("no CUDA device is available")
    return ExllamaV3Engine(library, torch, options)


def main() -> None:
    """Loads the model and serves requests."""
    serve(load, parse_arguments())


if __name__ == "__main__":
    main()
