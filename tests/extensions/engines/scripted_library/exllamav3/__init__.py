"""A stand-in for ExLlamaV3 1.6.5, with the calls that the engine makes and none of the mathematics.

It takes the arguments that `signatures.json` records of the library. As the real one it needs the cache before the
load, gives one cache to one generator, finds the pages of every earlier prompt for every later one, and works on its
jobs by turns. A token is a byte. SCRIPTED_EXLLAMAV3 holds switches as JSON.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripted_faults import misbehave_at_load
from tokenizers import Tokenizer as HFTokenizer
from torch import Tensor, long, tensor

from exllamav3.recorded import checked

SWITCHES: dict[str, Any] = json.loads(os.environ.get("SCRIPTED_EXLLAMAV3", "{}"))
PAGE = 256
BOS, EOS = 256, 257
if SWITCHES.get("import_fails"):
    raise OSError("CUDA_HOME environment variable is not set. Please set it to your CUDA install root.")


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Config:
    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.config_dict = json.loads((Path(directory) / "config.json").read_text())
        assert len(self.config_dict["architectures"]) == 1, "Multiple architectures defined"
        self.vocab_size = 258
        self.eos_token_id_list = [EOS]

    @staticmethod
    @checked("Config.from_directory")
    def from_directory(directory: str) -> "Config":
        return Config(directory)


class Model:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.caches: list[Cache] = []

    @staticmethod
    @checked("Model.from_config")
    def from_config(config: Config) -> "Model":
        return Model(config)

    @checked("Model.load_gen")
    def load_gen(self, **options: Any) -> Iterator[tuple[int, int]]:
        misbehave_at_load(SWITCHES)
        assert self.caches, "the engine makes the cache before the load"
        say(f"load: {json.dumps(options, sort_keys=True)}")
        for module in range(5):
            yield module, 4
        for cache in self.caches:
            cache.initialized = True


class CacheLayer_fp16: ...  # noqa: N801 - the library's name


class CacheLayer_quant: ...  # noqa: N801 - the library's name


class Cache:
    @checked("Cache.__init__", swallowed=("k_bits", "v_bits"))
    def __init__(self, model: Model, max_num_tokens: int, layer_type: type, max_batch_size: int, **bits: int) -> None:
        assert max_num_tokens % PAGE == 0, "max_num_tokens must be a multiple of 256."
        assert bool(bits) == (layer_type is CacheLayer_quant)
        say(f"cache: {max_num_tokens} tokens, {json.dumps(bits)}")
        self.max_num_tokens = max_num_tokens
        self.initialized = False
        self.owner: Generator | None = None
        model.caches.append(self)


class Tokenizer:
    def __init__(self, config: Config) -> None:
        self.tokenizer = HFTokenizer.from_file(str(Path(config.directory) / "tokenizer.json"))
        self.tokenizer_config_dict = json.loads((Path(config.directory) / "tokenizer_config.json").read_text())
        self.actual_vocab_size = config.vocab_size

    @staticmethod
    @checked("Tokenizer.from_config")
    def from_config(config: Config) -> "Tokenizer":
        return Tokenizer(config)

    @checked("Tokenizer.encode")
    def encode(self, text: str, add_bos: bool = False, encode_special_tokens: bool = False) -> Tensor:
        assert encode_special_tokens
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return tensor([[BOS, *ids] if add_bos else ids], dtype=long)


class ComboSampler:
    @checked("ComboSampler.__init__")
    def __init__(self, **options: Any) -> None:
        self.options = options


class LLGuidanceFilter:
    @checked("LLGuidanceFilter.__init__")
    def __init__(self, tokenizer: Tokenizer, eos_after_completed: bool = False, **source: Any) -> None:
        assert eos_after_completed
        ((self.kind, self.source),) = source.items()
        if self.kind == "gbnf_grammar" and "root" not in self.source:
            raise ValueError("Invalid grammar: no root")


class Job:
    @checked("Job.__init__")
    def __init__(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int | None = None,
        sampler: ComboSampler | None = None,
        seed: int | None = None,
        stop_conditions: list[int | str] | None = None,
        filters: list[LLGuidanceFilter] | None = None,
        banned_strings: list[str] | None = None,
        max_rq_tokens: int | None = None,
        stop_on_loop: tuple[int, int] | None = None,
        **further: Any,
    ) -> None:
        assert input_ids.device.type == "cpu"
        assert input_ids.shape[0] == 1
        assert input_ids.shape[1] > 0, "Input IDs cannot be empty."
        assert max_new_tokens is None or max_new_tokens >= 1
        if stop_on_loop is not None:
            assert 1 < stop_on_loop[1] < stop_on_loop[0]
        self.prompt: list[int] = input_ids.tolist()[0]
        self.limit = max_new_tokens
        self.loop = stop_on_loop
        self.stops = stop_conditions or []
        self.filters = filters or []
        self.banned = banned_strings or []
        options = {} if sampler is None else sampler.options
        self.told = {**options, "seed": seed, "rq": max_rq_tokens, "banned": self.banned, **further}
        self.done = 0
        self.cached = 0
        self.written: list[int] = []
        self.held = b""
        self.answer: Iterator[int] = iter(())
        self.began = 0.0

    def next_token(self) -> int:
        return next(self.answer)


class Generator:
    @checked("Generator.__init__")
    def __init__(
        self,
        model: Model,
        cache: Cache,
        tokenizer: Tokenizer,
        max_batch_size: int = 256,
        max_chunk_size: int = 2048,
        max_q_size: int = 8,
    ) -> None:
        assert max_chunk_size % PAGE == 0
        say(f"generator: {max_batch_size} at once, chunks of {max_chunk_size}, {max_q_size} per step")
        self.cache, self.chunk, self.batch = cache, max_chunk_size, max_batch_size
        cache.owner = self
        self.pending_jobs: list[Job] = []
        self.active_jobs: list[Job] = []
        self.pages: list[list[int]] = []

    @checked("Generator.get_cache_stats")
    def get_cache_stats(self) -> dict[str, int]:
        return {"cached_tokens": sum(map(len, self.pages)), "active_jobs": len(self.active_jobs)}

    def enqueue(self, job: Job) -> None:
        room = self.cache.max_num_tokens - len(job.prompt) - 1
        job.limit = room if job.limit is None else min(job.limit, room)
        pages = -(-(len(job.prompt) + job.limit + 1) // PAGE)
        assert pages <= self.cache.max_num_tokens // PAGE, f"Job requires {pages} pages and cannot be enqueued."
        self.pending_jobs.append(job)

    def cancel(self, job: Job) -> None:
        for jobs in (self.pending_jobs, self.active_jobs):
            if job in jobs:
                jobs.remove(job)
                self.pages.append([*job.prompt[: job.done], *job.written])
                say(f"cancelled after {job.done} of {len(job.prompt)} and {len(job.written)} tokens")

    def close(self) -> None: ...

    def iterate(self) -> list[dict[str, Any]]:
        if self.cache.owner is not self:
            raise RuntimeError("This Generator no longer owns its Cache")
        assert self.cache.initialized
        results: list[dict[str, Any]] = []
        while self.pending_jobs and len(self.active_jobs) < self.batch:
            self._begin(self.pending_jobs.pop(0), results)
        say(f"at work: {len(self.active_jobs)}")
        for job in list(self.active_jobs):
            if job.done < len(job.prompt) - 1:
                self._prefill(job, results)
            else:
                self._step(job, results)
        return results

    def _begin(self, job: Job, results: list[dict[str, Any]]) -> None:
        job.began = time.monotonic()
        job.cached = max((common(job.prompt, earlier) for earlier in self.pages), default=0)
        job.done = job.cached = min(job.cached, len(job.prompt) - 1)
        say(f"prompt: {job.cached} of {len(job.prompt)} cached")
        job.answer = answer_to(job)
        self.active_jobs.append(job)
        results.append({"job": job, "stage": "started", "eos": False})

    def _prefill(self, job: Job, results: list[dict[str, Any]]) -> None:
        time.sleep(SWITCHES.get("seconds_per_chunk", 0.0))
        job.done = min(job.done + self.chunk, len(job.prompt) - 1)
        last = len(job.prompt) - 1
        results.append({"job": job, "stage": "prefill", "eos": False, "curr_progress": job.done, "max_progress": last})

    def _step(self, job: Job, results: list[dict[str, Any]]) -> None:
        time.sleep(SWITCHES.get("seconds_per_token", 0.0))
        if SWITCHES.get("breaks_at_token") == len(job.written) + 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        token = job.next_token()
        job.written.append(token)
        job.held += bytes([token]) if token < 256 else b""
        result: dict[str, Any] = {"job": job, "stage": "streaming", "eos": False}
        reason = self._reason(job, token)
        if reason or not self._holds(job):
            if text := job.held.decode(errors="replace"):
                result["text"] = text
            job.held = b""
        if reason:
            self.active_jobs.remove(job)
            self.pages.append([*job.prompt, *job.written])
            took = time.monotonic() - job.began
            result |= {"eos": True, "eos_reason": reason, "new_tokens": len(job.written), "time_enqueued": 0.0}
            result |= {"prompt_tokens": len(job.prompt), "cached_pages": job.cached // PAGE, "time_prefill": took / 2}
            result |= {"cached_tokens": job.cached, "time_generate": took / 2}
        results.append(result)

    def _reason(self, job: Job, token: int) -> str:
        if token in job.stops:
            return "stop_token"
        if len(job.written) >= (job.limit or 0):
            return "max_new_tokens"
        for stop in job.stops:
            if isinstance(stop, str) and (index := job.held.find(stop.encode())) >= 0:
                job.held = job.held[:index]
                return "stop_string"
        if job.loop is not None and loops(job.written, *job.loop):
            return "loop_detected"
        return ""

    def _holds(self, job: Job) -> bool:
        """Whether the held text may be the beginning of a stop string, or has half a character."""
        try:
            text = job.held.decode()
        except UnicodeDecodeError:
            return True
        stops = [stop for stop in job.stops if isinstance(stop, str)]
        return any(stop.startswith(text[index:]) for stop in stops for index in range(len(text)))


def common(one: list[int], other: list[int]) -> int:
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def loops(written: list[int], window: int, repeats: int) -> bool:
    last = written[-window:]
    periods = range(1, window // repeats + 1)
    return len(last) == window and any(last[period:] == last[:-period] for period in periods)


def answer_to(job: Job) -> Iterator[int]:
    answer = SWITCHES.get("answer", "The sea is calm and blue today.")
    if SWITCHES.get("echo_options"):
        answer = json.dumps({name: value for name, value in job.told.items() if value is not None})
    if job.filters:
        answer = json.dumps([job.filters[0].kind, job.filters[0].source])
    if SWITCHES.get("echo_prompt"):
        yield from "".join("<s>" if token == BOS else chr(token) for token in job.prompt).encode("latin-1")
        answer = ""
    while SWITCHES.get("endless"):
        yield from answer.encode()
    yield from answer.encode()
    yield EOS


from exllamav3.asynchronous import AsyncGenerator, AsyncJob  # noqa: E402 - it needs what is above

__all__ = ["AsyncGenerator", "AsyncJob", "Config"]
