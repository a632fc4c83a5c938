"""The engine: one task takes steps for all requests and hands out their tokens."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import Counter
from tokenizers import Tokenizer as HFTokenizer

from vllm import SWITCHES, say
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.pooling_params import PoolingParams
from vllm.recorded import checked
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

BLOCK = 16
BOS, EOS = 256, 257
VOCABULARY = 258
Blocks = tuple[str | None, tuple[int, ...]]


class Tokenizer:
    chat_template = "{{ messages[0].content }}"
    bos_token, eos_token = "<s>", "</s>"

    def __init__(self) -> None:
        self._tokenizer = HFTokenizer()
        self.backend_tokenizer = self

    def to_str(self) -> str:
        return json.dumps({"decoder": {"type": "ByteLevel"}, "added_tokens": [{"content": "<s>"}]})

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [self._tokenizer.id_to_token(number) for number in ids]


class Request:
    """One choice of one request."""

    def __init__(self, prompt: list[int], params: SamplingParams, index: int, salt: str | None) -> None:
        self.prompt, self.params, self.index, self.salt = prompt, params, index, salt
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.cached = self.done = 0
        self.text = b""
        self.shown = 0
        self.answer = answer_to(prompt, params)
        now = time.monotonic()
        self.stats = SimpleNamespace(queued_ts=now, scheduled_ts=0.0, first_token_ts=0.0, last_token_ts=0.0)
        self.stats.num_preemptions = int(SWITCHES.get("preemptions", 0))


class AsyncLLM:
    def __init__(self, args: Any, stat_loggers: list[Any]) -> None:
        self.loggers = [make(None, 0) for make in stat_loggers]
        # As vLLM has it: beside the loggers that it is given, its metrics are in the registry of its process.
        self.success = Counter("vllm:request_success", "Requests that it ended.", ["model_name"])
        self.success.labels("m")
        self.model_config = SimpleNamespace(
            max_model_len=args.max_model_len,
            get_vocab_size=lambda: VOCABULARY,
            get_diff_sampling_param=lambda: dict(SWITCHES.get("defaults", {})),
        )
        blocks = (args.kv_cache_memory_bytes or 2**20) // 1024
        cache = SimpleNamespace(num_gpu_blocks=blocks, block_size=BLOCK, kv_cache_size_tokens=None)
        cache.kv_cache_memory_bytes = args.kv_cache_memory_bytes
        scheduler = SimpleNamespace(max_num_seqs=args.max_num_seqs)
        self.vllm_config = SimpleNamespace(
            cache_config=cache, scheduler_config=scheduler, parallel_config=SimpleNamespace(world_size=2)
        )
        self.args = args
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.kept: set[Blocks] = set()
        self.is_dead = False
        self.asleep = 0
        self.busy_resets = int(SWITCHES.get("busy_resets", 0))
        self.has_work = asyncio.Event()
        self.working = asyncio.create_task(self.work())

    @classmethod
    @checked("AsyncLLM.from_engine_args")
    def from_engine_args(cls, engine_args: AsyncEngineArgs, stat_loggers: list[Any]) -> "AsyncLLM":
        assert isinstance(engine_args, AsyncEngineArgs)
        given = {name: value for name, value in vars(engine_args).items() if value is not None}
        say(f"engine arguments: {json.dumps(given, sort_keys=True)}")
        folder = Path(engine_args.model)
        if not SWITCHES.get("on_hub") and not (folder / "config.json").is_file():
            raise ValueError(f"Invalid repository ID or local directory specified: '{folder}'.")
        return cls(engine_args, stat_loggers)

    @checked("AsyncLLM.get_tokenizer")
    def get_tokenizer(self) -> Tokenizer:
        return Tokenizer()

    @checked("AsyncLLM.get_num_unfinished_requests")
    def get_num_unfinished_requests(self) -> int:
        return len(self.waiting) + len(self.running)

    @checked("AsyncLLM.check_health")
    async def check_health(self) -> None:
        if self.is_dead:
            raise EngineDeadError

    @checked("AsyncLLM.generate")
    async def generate(
        self, prompt: dict[str, Any], sampling_params: SamplingParams, request_id: str, *, lora_request: Any = None
    ) -> AsyncGenerator[SimpleNamespace]:
        await self.check_health()
        assert request_id.startswith("weft-")
        assert set(prompt) <= {"prompt_token_ids", "cache_salt"}
        assert sampling_params.output_kind is RequestOutputKind.DELTA
        if lora_request is not None:
            assert self.args.enable_lora
            say(f"adapter {lora_request.lora_int_id}: {lora_request.lora_path}")
        structured = sampling_params.structured_outputs
        if structured is not None and structured.grammar is not None and "root" not in structured.grammar:
            raise VLLMValidationError("Invalid grammar specification.")
        if sampling_params.bad_words == ["raises"]:
            raise EngineGenerateError from ValueError("the words are bad")
        ids, salt = prompt["prompt_token_ids"], prompt.get("cache_salt")
        choices = [Request(ids, sampling_params, index, salt) for index in range(sampling_params.n or 1)]
        self.waiting += choices
        self.has_work.set()
        try:
            while choices:
                for choice in list(choices):
                    output = await choice.queue.get()
                    if isinstance(output, Exception):
                        raise output
                    if output.outputs[0].finish_reason:
                        choices.remove(choice)
                    yield output
        except (asyncio.CancelledError, GeneratorExit):
            for choice in choices:
                say(f"aborted after {choice.done} of {len(choice.prompt)} and {len(choice.text)} tokens")
                (self.running if choice in self.running else self.waiting).remove(choice)
            raise

    @checked("AsyncLLM.encode")
    async def encode(
        self, prompt: dict[str, Any], pooling_params: PoolingParams, request_id: str
    ) -> AsyncGenerator[SimpleNamespace]:
        assert self.args.runner == "pooling", "This model does not support embed"
        assert pooling_params.task == "embed"
        assert request_id
        ids = prompt["prompt_token_ids"]
        data = SimpleNamespace(float=lambda: SimpleNamespace(tolist=lambda: [float(sum(ids)), float(len(ids))]))
        yield SimpleNamespace(outputs=SimpleNamespace(data=data), prompt_token_ids=ids, finished=True)

    @checked("AsyncLLM.reset_prefix_cache")
    async def reset_prefix_cache(self) -> bool:
        if self.busy_resets:
            self.busy_resets -= 1
            return False
        self.kept.clear()
        return True

    @checked("AsyncLLM.sleep")
    async def sleep(self, level: int = 1) -> None:
        assert self.args.enable_sleep_mode, "Sleep mode is not enabled"
        say(f"sleep at level {level}")
        self.asleep = level

    @checked("AsyncLLM.wake_up")
    async def wake_up(self, tags: list[str] | None = None) -> bool:
        say(f"wake up {tags}")
        if tags in (None, ["kv_cache"]):
            self.asleep = 0
        return not self.asleep

    @checked("AsyncLLM.is_sleeping")
    async def is_sleeping(self) -> bool:
        return bool(self.asleep or SWITCHES.get("does_not_wake"))

    @checked("AsyncLLM.collective_rpc")
    async def collective_rpc(self, method: str) -> None:
        say(f"called {method} of the workers")

    async def work(self) -> None:
        try:
            while True:
                if not self.get_num_unfinished_requests():
                    self.has_work.clear()
                    await self.has_work.wait()
                await asyncio.sleep(SWITCHES.get("seconds_per_token", 0.0))
                self.step()
        except Exception as error:  # noqa: BLE001 - the engine's processes end, which is all that its callers see
            say(f"engine core: {error}")
            self.is_dead = True
            for request in [*self.waiting, *self.running]:
                request.queue.put_nowait(EngineDeadError())

    def step(self) -> None:
        assert not self.asleep
        hits = queries = 0
        while self.waiting and len(self.running) < self.args.max_num_seqs:
            request = self.waiting.pop(0)
            request.stats.scheduled_ts = time.monotonic()
            request.cached = request.done = self.find(request)
            queries, hits = queries + len(request.prompt), hits + request.cached
            self.running.append(request)
            say(f"prompt: {request.cached} of {len(request.prompt)} cached")
        say(f"at work: {len(self.running)}")
        for request in list(self.running):
            if request.done < len(request.prompt):
                chunk = int(SWITCHES.get("tokens_per_step", 100_000))
                request.done = min(request.done + chunk, len(request.prompt))
            else:
                self.decode(request)
        self.record(queries, hits)

    def decode(self, request: Request) -> None:
        stats, params = request.stats, request.params
        if SWITCHES.get("breaks_at_token") == len(request.text) + 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        token = next(request.answer)
        stats.last_token_ts = time.monotonic()
        stats.first_token_ts = stats.first_token_ts or stats.last_token_ts
        request.text += bytes([token]) if token < 256 else b""
        reason = "stop" if token == EOS else "length" if len(request.text) >= params.max_tokens else None
        text = request.text.decode(errors="ignore")
        held = max(map(len, params.stop), default=1) - 1 if params.stop else 0
        for stop in params.stop or ():
            if (place := text.find(stop)) >= 0:
                reason, text = "stop", text[: place + (len(stop) if params.include_stop_str_in_output else 0)]
        upto = len(text) if reason else max(request.shown, len(text) - held)
        delta, request.shown = text[request.shown : upto], upto
        choice = SimpleNamespace(index=request.index, text=delta, token_ids=[token], finish_reason=reason)
        if reason:
            self.running.remove(request)
            self.keep(request)
        output = SimpleNamespace(outputs=[choice], num_cached_tokens=request.cached, metrics=stats)
        request.queue.put_nowait(output)

    def find(self, request: Request) -> int:
        if request.params.skip_reading_prefix_cache:
            return 0
        count = 0
        # The last token is always computed.
        while count + BLOCK < len(request.prompt) and self.block(request, count) in self.kept:
            count += BLOCK
        return count

    def keep(self, request: Request) -> None:
        for count in range(0, len(request.prompt) - BLOCK + 1, BLOCK):
            self.kept.add(self.block(request, count))

    def block(self, request: Request, begin: int) -> Blocks:
        return request.salt, tuple(request.prompt[: begin + BLOCK])

    def record(self, queries: int, hits: int) -> None:
        scheduler = SimpleNamespace(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            num_skipped_waiting_reqs=0,
            kv_cache_usage=min(1.0, sum(len(request.prompt) for request in self.running) / 1024),
            prefix_cache_stats=SimpleNamespace(queries=queries, hits=hits),
        )
        iteration = SimpleNamespace(num_preempted_reqs=int(SWITCHES.get("preemptions", 0)) if queries else 0)
        for logger in self.loggers:
            logger.record(scheduler, iteration, mm_cache_stats=None, engine_idx=0)


def answer_to(prompt: list[int], params: SamplingParams) -> Any:
    answer = SWITCHES.get("answer", "The sea is calm and blue today.")
    if SWITCHES.get("echo_options"):
        told = {name: value for name, value in params.given.items() if name != "output_kind"}
        if params.structured_outputs is not None:
            found = vars(params.structured_outputs)
            told["structured_outputs"] = {name: value for name, value in found.items() if value is not None}
        answer = json.dumps(told)
    if SWITCHES.get("echo_prompt"):
        yield from "".join("<s>" if token == BOS else chr(token) for token in prompt).encode("latin-1")
        answer = ""
    while SWITCHES.get("endless"):
        yield from answer.encode()
    yield from answer.encode()
    yield EOS
