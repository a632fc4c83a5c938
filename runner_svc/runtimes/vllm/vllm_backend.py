"""Backend of the runtime vllm: `vllm serve` as a supervised child process on its own Unix socket.

Its routes to sleep, empty the cache and abort a request require development mode, in which unprotected routes can run
code in the engine. Therefore the socket is in a folder that only this user can enter.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Container, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial

import msgspec
from typing_extensions import override

from runner_svc.backend.port import BackendFacts, CacheIsolation, CallInfo, ErasedCache, LoadOrder
from runner_svc.openai_upstream.client import Endpoint, OpenAiHttp
from runner_svc.openai_upstream.errors import JSON_FAULTS
from runner_svc.openai_upstream.server_probes import HEALTH, MODELS
from runner_svc.policy.memory_estimate import ModelShape
from runner_svc.runtimes.engine_figures import MetricsPage
from runner_svc.runtimes.kv_events import can_follow
from runner_svc.runtimes.metrics_page import MAX_COUNT, VLLM, load_of, samples_of
from runner_svc.runtimes.model_engine import ModelContext
from runner_svc.runtimes.server_calls import require_done
from runner_svc.runtimes.started_server import StartedServer, StartLog
from runner_svc.runtimes.vllm.arguments import (
    adapter_bodies,
    device_count,
    load_parameters,
    operations_of,
    reports_blocks,
    server_arguments,
    server_environment,
    sleeps_in_place,
)
from runner_svc.runtimes.vllm.runtime import PARAMETERS, VllmModel
from runner_svc.supervise.socket_folder import SocketFolder
from weft.api.common.v1 import chat_pb2
from weft.api.registry.v1 import runner_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.load_parameters import LoadParameter
from weft.kernel.services.service_lifecycle import start_task, stop_tasks

_STAGES = (
    (0.1, 0.6, re.compile(r"Starting to load model|Loading \w+ checkpoint shards")),
    (0.6, 0.75, re.compile(r"Loading weights took|Model loading took|Available KV cache memory|KV cache size")),
    (0.75, 0.95, re.compile(r"Capturing CUDA graphs|Warming up model")),
    (0.95, 1.0, re.compile(r"init engine .* took|Starting vLLM (API )?server|Application startup complete")),
)
"""The stages of a load (weights, cache, graphs, server): the loaded share at the start and end of each, and the output
lines that show it."""
_PERCENT = re.compile(r"(\d{1,3})%")


def load_share(line: str) -> float:
    """Returns the loaded share that an output line shows; 0: none."""
    found = next(((begin, end) for begin, end, sign in reversed(_STAGES) if sign.search(line)), None)
    if found is None:
        return 0.0
    begin, end = found
    # A progress bar rewrites its line, so the last percentage counts.
    percents = _PERCENT.findall(line)
    return begin + (end - begin) * (min(100, int(percents[-1])) / 100 if percents else 0.0)


_LABEL = re.compile(r'([a-z_]{1,64})="([^"]{0,256})"')


def read_load(page: str, devices: int = 1) -> runner_pb2.EngineLoad:
    """Returns the figures on a page; missing ones are unset. Several engines, each on `devices`, are added up."""
    samples = samples_of(page)
    load = load_of(samples, VLLM)
    caches = [dict(_LABEL.findall(sample.labels)) for sample in samples if sample.name == "vllm:cache_config_info"]
    tokens = sum(_whole(cache.get("block_size", "")) * _whole(cache.get("num_gpu_blocks", "")) for cache in caches)
    if tokens:
        load.kv_cache_tokens = min(tokens, MAX_COUNT)
    # Known only if the size was set in bytes.
    sizes = [_whole(cache.get("kv_cache_memory_bytes", "")) for cache in caches]
    if sizes and all(sizes):
        load.kv_cache_bytes = min(sum(sizes) * devices, MAX_COUNT)
    return load


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(MAX_COUNT)) else 0


ROUTE_SECONDS = 5.0
SLEEP_SECONDS = 120.0
"""Timeout of a sleep or a wake, which copies the weights between devices and main memory."""
RESET_TRIES = 10
RESET_PAUSE_SECONDS = 0.2
"""The cache can be emptied only while no request uses it; a finished request frees its part a little later."""
MAX_ABORTS = 1024
"""Maximum number of running aborts; closing a connection aborts its request too."""
MAX_SOCKET_PATH_BYTES = 100
"""Operating systems allow at least 104."""
_LEVEL_WITHOUT_WEIGHTS = 2


class _ServedModel(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _ServedModels(msgspec.Struct):
    data: list[_ServedModel]


class _Reset(msgspec.Struct):
    success: bool = True


class _Sleeping(msgspec.Struct):
    is_sleeping: bool


class VllmBackend(StartedServer[VllmModel]):
    """Backend of one `vllm serve`."""

    engine_parameters = PARAMETERS
    key_variable = "VLLM_API_KEY"
    noun = "vLLM"
    cache_isolation = CacheIsolation.SALT

    def __init__(
        self,
        model: VllmModel,
        context: ModelContext,
        shape: ModelShape | None = None,
    ) -> None:
        """`shape`: the shape of the model's files; None: unknown."""
        self.reports_blocks = reports_blocks(model) and can_follow()
        super().__init__(model, context)
        self.operations, self.start_timeout_seconds = operations_of(model), model.start_timeout_seconds
        self._shape = shape
        self._folder: SocketFolder | None = None
        """Folder of its socket."""
        self._context_tokens = model.slot_context_tokens
        """Context of the current load: vLLM rejects a larger maximum length of the answer."""
        self._aborts = set[asyncio.Task[None]]()

    @property
    @override
    def load_parameters(self) -> Sequence[LoadParameter]:
        return load_parameters(self.model, self.context.trained_context_tokens)

    @property
    @override
    def kept_prompt_bytes(self) -> int:
        # vLLM moves them itself; the memory is added to the limit of the process.
        return self.model.max_kept_prompt_bytes

    @override
    def arguments(self, order: LoadOrder, port: int) -> list[str]:
        return [*server_arguments(self.model, order, self._shape), "--uds", self._socket_path]

    @override
    def environment(self, order: LoadOrder) -> Mapping[str, str]:
        return server_environment(self.model, order, self.context.environment)

    @override
    def note_line(self, line: str, log: StartLog) -> None:
        log.share = max(log.share or 0.0, load_share(line))

    @override
    async def address(self, log: StartLog) -> str:
        return "http://vllm"  # a placeholder: requests are sent to the socket

    @override
    def endpoint(self, base_url: str, api_key: str) -> Endpoint:
        return Endpoint(
            base_url=base_url,
            socket_path=self._socket_path,
            api_key=api_key,
            model=self.model.name,
            parameters=replace(self.parameters, most_answer_tokens=self._context_tokens),
            adapters=adapter_bodies(self.model),
        )

    @override
    async def prepare(self, order: LoadOrder) -> None:
        self._context_tokens = int(order.parameters.get("context_tokens", self.model.slot_context_tokens))
        read = partial(read_load, devices=device_count(self.model, order))
        self.metrics_page = MetricsPage("/metrics", read)
        self._folder = await asyncio.to_thread(SocketFolder, "weft-vllm-")
        if len(self._socket_path.encode()) > MAX_SOCKET_PATH_BYTES:
            message = f"the folder for temporary files has too long a path for a socket: {self._folder.path.parent}"
            raise WeftError(Reason.CONNECT_FAILED, message)

    @override
    async def facts(self, http: OpenAiHttp, order: LoadOrder) -> BackendFacts:
        served = await _served_model(http)
        return BackendFacts(
            operations=self.operations,
            context_tokens=served.max_model_len or self._context_tokens,
            slots=int(order.parameters.get("slots", self.model.slots)),
        )

    @override
    async def free_memory(self, http: OpenAiHttp, order: LoadOrder) -> bool:
        level = self.model.sleep_level
        if level is None or not sleeps_in_place(self.model, order):
            return False
        await require_done(http, f"/sleep?level={level}", SLEEP_SECONDS)
        return await _is_sleeping(http)

    @override
    async def stop(self) -> None:
        aborts, self._aborts = self._aborts, set()
        await stop_tasks(aborts)
        try:
            await super().stop()
        finally:
            folder, self._folder = self._folder, None
            if folder is not None:
                folder.remove()

    @override
    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        is_over = False
        try:
            async with aclosing(super().generate(payload, call)) as frames:
                async for frame in frames:
                    yield frame
            is_over = True
        finally:
            if not is_over:
                self._abort(payload, call.request_id)

    @override
    async def erase_cache(self, slots: Sequence[int] | None = None) -> ErasedCache:
        """Empties the whole cache, whatever the slots, because vLLM has none."""
        http = self._running()
        for tries_left in reversed(range(RESET_TRIES)):
            status, body = await http.call_route("POST", "/reset_prefix_cache", ROUTE_SECONDS)
            if status == 404:
                raise WeftError(Reason.UNSUPPORTED_OPERATION, "this vLLM cannot empty its cache")
            with suppress(*JSON_FAULTS):
                if status == 200 and (not body or msgspec.json.decode(body, type=_Reset).success):
                    self.note_emptied_cache()
                    return ErasedCache(entry_count=0)
            if tries_left:
                await asyncio.sleep(RESET_PAUSE_SECONDS)
        raise WeftError(Reason.BACKEND_ERROR, "vLLM did not empty its cache, because requests use it")

    @override
    def _next_port(self, tried: Container[int]) -> int:
        return 0  # it listens on a socket

    @property
    def _socket_path(self) -> str:
        return "" if self._folder is None else str(self._folder.path / "socket")

    @override
    async def take_memory(self, http: OpenAiHttp) -> None:
        if self.model.sleep_level == _LEVEL_WITHOUT_WEIGHTS:
            await require_done(http, "/wake_up?tags=weights", SLEEP_SECONDS)
            await require_done(http, "/collective_rpc", SLEEP_SECONDS, b'{"method":"reload_weights"}')
            await require_done(http, "/wake_up?tags=kv_cache", SLEEP_SECONDS)
        else:
            await require_done(http, "/wake_up", SLEEP_SECONDS)
        if await _is_sleeping(http) or await http.status_of(HEALTH, ROUTE_SECONDS) != 200:
            raise WeftError(Reason.BACKEND_ERROR, "it still sleeps")

    def _abort(self, payload: GenerationPayload, request_id: str) -> None:
        """Aborts a request after its caller has disconnected; without an id vLLM would abort all requests."""
        http = self._http
        if http is None or not request_id or len(self._aborts) >= MAX_ABORTS:
            return
        kind = "chatcmpl" if isinstance(payload, chat_pb2.ChatPayload) else "cmpl"
        task = start_task(_abort_quietly(http, f"{kind}-{request_id}"), name="abort-vllm-request")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


async def _served_model(http: OpenAiHttp) -> _ServedModel:
    """Returns what the server reports about the model. Raises BACKEND_PROTOCOL_ERROR if it does not serve it."""
    answer = await http.answer_of(MODELS, ROUTE_SECONDS)
    status, body = (None, b"") if answer is None else answer
    with suppress(*JSON_FAULTS):
        if status == 200:
            for served in msgspec.json.decode(body, type=_ServedModels).data:
                if served.id == http.endpoint.model:
                    return served
    raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"vLLM does not list the model that it serves (status {status})")


async def _is_sleeping(http: OpenAiHttp) -> bool:
    status, body = await http.call_route("GET", "/is_sleeping", ROUTE_SECONDS)
    with suppress(*JSON_FAULTS):
        if status == 200:
            return msgspec.json.decode(body, type=_Sleeping).is_sleeping
    raise WeftError(Reason.BACKEND_ERROR, f"vLLM does not report whether it sleeps (status {status})")


async def _abort_quietly(http: OpenAiHttp, request_id: str) -> None:
    with suppress(WeftError):
        await http.call_route(
            "POST", "/abort_requests", ROUTE_SECONDS, msgspec.json.encode({"request_ids": [request_id]})
        )
