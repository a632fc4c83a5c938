"""Backend of the runtime llama_server: llama.cpp's HTTP server as a supervised child process.

The command is any program with llama-server's flags and HTTP interface: a native `llama-server`, weft's launcher for
the `xllamacpp` wheel, or `weft_testing.fake_backend`. A new random key per start keeps other programs off its port.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
from typing_extensions import override

from runner_svc.backend.port import (
    BackendFacts,
    CacheIsolation,
    CallInfo,
    ErasedCache,
    LoadOrder,
    SlotSnapshot,
)
from runner_svc.openai_upstream.client import Endpoint, OpenAiHttp
from runner_svc.openai_upstream.errors import JSON_FAULTS
from runner_svc.policy.memory_estimate import MEBIBYTE
from runner_svc.policy.template_capabilities import capabilities_of_templates
from runner_svc.runtimes.engine_figures import MetricsPage
from runner_svc.runtimes.llama_props import read_props
from runner_svc.runtimes.llama_server.arguments import (
    MEMORY_LOG,
    NO_HOST_CACHE,
    adapter_bodies,
    check_together,
    context_of,
    load_parameters,
    names_template,
    operations_of,
    refused_parameter,
    reranks,
    server_arguments,
    shares_between_slots,
    slots_of,
)
from runner_svc.runtimes.llama_server.runtime import PARAMETERS, LlamaServerModel
from runner_svc.runtimes.metrics_page import LLAMA_CPP, load_of, samples_of
from runner_svc.runtimes.model_engine import ModelContext
from runner_svc.runtimes.saved_prompts import PromptSavingServer
from runner_svc.runtimes.started_server import StartLog
from runner_svc.templates.rendered_request import rendered_translation
from runner_svc.templates.sandbox import ModelTemplates, TemplateSandbox, check_before_load
from runner_svc.templates.translation import translates
from weft.api.common.v1 import chat_pb2, tokenize_pb2
from weft.api.registry.v1 import runner_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.load_parameters import LoadParameter, LoadValue

_COMPUTED, _CACHED = "llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"


def read_load(page: str) -> runner_pb2.EngineLoad:
    """Returns the figures on a page; missing ones are unset."""
    samples = samples_of(page)
    load = load_of(samples, LLAMA_CPP)
    tokens = {sample.name: round(sample.value) for sample in samples if sample.name in (_COMPUTED, _CACHED)}
    if len(tokens) == len((_COMPUTED, _CACHED)):
        load.prefix_hit_tokens = tokens[_CACHED]
        load.prefix_query_tokens = tokens[_COMPUTED] + tokens[_CACHED]
    return load


SLOTS = "/slots"
"""The server defers a task for a busy slot until the slot is free, and runs a task for a nonexistent slot in any slot
(measured with 0.5.0, November 2026)."""
LOOK_SECONDS = 1.0
"""Timeout of GET /slots; the server responds within milliseconds, even during prompt processing."""
ERASE_SECONDS = 30.0
"""Maximum wait for a busy slot before it is erased."""
NO_TASK = -1
"""Task id of an unused slot, or of a server that reports none."""
ADAPTERS = "/lora-adapters"
ADAPTERS_SECONDS = 5.0
MAX_BUFFER_BYTES = 2**53
MESSAGE_TEMPLATE = Path(__file__).with_name("message.jinja")
"""Template for the server of a translation model, which inserts messages unchanged. The model's own template would fail
with the server's test messages at startup, so prompts are rendered here."""
# "load_tensors:   CPU_Mapped model buffer size =    92.10 MiB", "llama_kv_cache:   CPU KV buffer size =   180.00 MiB".
# Other buffers, such as compute buffers, are ignored.
_BUFFER = re.compile(r"\b(model|KV) buffer size = {1,12}(\d{1,12}(?:\.\d{1,6})?) MiB")
_UNKNOWN_FLAGS = re.compile(r"error: (?:invalid argument|unrecognized arguments): (--[^\n]{1,1000})")


class _Slot(msgspec.Struct):
    id: int
    is_processing: bool = False
    id_task: int = NO_TASK
    n_prompt_tokens: int | None = None
    """Number of cached tokens; older servers do not report it."""

    @property
    def snapshot(self) -> SlotSnapshot:
        is_unused = self.id_task == NO_TASK and self.n_prompt_tokens is None
        return SlotSnapshot(
            number=self.id,
            is_busy=self.is_processing,
            is_empty=not self.is_processing and (is_unused or self.n_prompt_tokens == 0),
            task=None if self.id_task == NO_TASK else self.id_task,
            token_count=max(0, self.n_prompt_tokens or 0),
        )


class _Erased(msgspec.Struct):
    n_erased: int = 0


def note_buffer(line: str, memory: runner_pb2.EngineLoad) -> None:
    """Adds the buffer in a log line to the memory of the weights or the KV cache.

    There is one line per device. Buffers of a draft model and a projector are included in the sums.
    """
    if (found := _BUFFER.search(line)) is not None:
        field = "weight_bytes" if found[1] == "model" else "kv_cache_bytes"
        setattr(memory, field, min(getattr(memory, field) + round(float(found[2]) * MEBIBYTE), MAX_BUFFER_BYTES))


class LlamaServerBackend(PromptSavingServer[LlamaServerModel]):
    """Backend of one llama.cpp server process."""

    engine_parameters = PARAMETERS
    metrics_page = MetricsPage("/metrics", read_load)
    key_variable = "LLAMA_API_KEY"

    def __init__(self, model: LlamaServerModel, context: ModelContext) -> None:
        super().__init__(model, context)
        self.operations = operations_of(model)
        self._slot_count: int | None = None
        """Number of slots that the running server reports, 0 if none; None: it is not running."""
        self._sandbox = TemplateSandbox()
        self._translation: ModelTemplates | None = None
        """Templates of a translation model; None: the server renders the prompts."""

    @property
    @override
    def load_parameters(self) -> Sequence[LoadParameter]:
        return load_parameters(self.model, self.context.trained_context_tokens)

    @override
    def check_load(self, parameters: Mapping[str, LoadValue], field: str = "parameters") -> None:
        super().check_load(parameters, field)
        check_together(parameters, field)

    @property
    @override
    def cache_isolation(self) -> CacheIsolation:
        shares = shares_between_slots(self.model.extra_arguments) or self._slot_count == 0
        return CacheIsolation.NONE if shares else CacheIsolation.SLOTS

    @property
    @override
    def slot_count(self) -> int:
        return self._slot_count or 0

    @override
    async def slot_snapshots(self) -> Sequence[SlotSnapshot]:
        try:
            status, body = await self._running().call_route("GET", SLOTS, LOOK_SECONDS)
            slots = msgspec.json.decode(body, type=list[_Slot]) if status == 200 else []
        except (WeftError, *JSON_FAULTS):
            return ()
        return tuple(slot.snapshot for slot in slots)

    @override
    async def erase_cache(self, slots: Sequence[int] | None = None) -> ErasedCache:
        """See Backend.erase_cache; waits for busy slots, at most ERASE_SECONDS."""
        if self._slot_count is None:
            return ErasedCache(entry_count=0, token_count=0)
        chosen = range(self._slot_count) if slots is None else slots
        counts = await asyncio.gather(*(self._erase(number) for number in chosen))
        return ErasedCache(entry_count=sum(count > 0 for count in counts), token_count=sum(counts))

    async def _erase(self, number: int) -> int:
        status, body = await self._running().call_route("POST", f"{SLOTS}/{number}?action=erase", ERASE_SECONDS)
        if status in (404, 501):
            raise WeftError(Reason.UNSUPPORTED_OPERATION, "this server cannot erase the cache of its slots")
        try:
            if status == 200:
                return max(0, msgspec.json.decode(body, type=_Erased).n_erased)
        except JSON_FAULTS:
            pass
        raise WeftError(Reason.BACKEND_ERROR, f"the server did not erase slot {number} (status {status})")

    @override
    def arguments(self, order: LoadOrder, port: int) -> list[str]:
        template = [] if self._translation is None else ["--chat-template-file", str(MESSAGE_TEMPLATE)]
        return [*server_arguments(self.model, order, port, self.context.shape, self.saved_folder), *template]

    @override
    def environment(self, order: LoadOrder) -> Mapping[str, str]:
        return {**NO_HOST_CACHE, **MEMORY_LOG, **super().environment(order)}

    @override
    async def prepare(self, order: LoadOrder) -> None:
        # The engine does not sandbox the chat templates of model files.
        templates = await check_before_load(order.model_path or self.model.file, self.model.chat_template_file)
        # The server has built-in templates for models without one, and accepts others by name.
        is_known = templates.all and not names_template(self.model)
        self.parameters = replace(self.parameters, templates=templates.all if is_known else None)
        if not reranks(self.model):
            await self.begin_saving(server_arguments(self.model, order), order)
        is_translator = is_known and templates.usual is not None and translates(templates.usual)
        self._translation = templates if is_translator else None

    @override
    def note_line(self, line: str, log: StartLog) -> None:
        note_buffer(line, log.memory)
        if (unknown := _UNKNOWN_FLAGS.search(line)) is not None:
            refused = refused_parameter(unknown[1], log.order)
            message = "cannot be set: this version of llama.cpp's server does not support it"
            log.refusal = None if refused is None else invalid_field(f"parameters.{refused}", message)

    @override
    def endpoint(self, base_url: str, api_key: str) -> Endpoint:
        return Endpoint(
            base_url=base_url,
            api_key=api_key,
            parameters=self.parameters,
            is_llama_server=True,
            adapters=adapter_bodies(self.model),
        )

    @override
    async def facts(self, http: OpenAiHttp, order: LoadOrder) -> BackendFacts:
        await _require_adapters(http, len(self.model.adapters))
        props = await read_props(http)
        self._slot_count = props.slots
        self.note_build(props.build)
        return BackendFacts(
            operations=self.operations,
            context_tokens=props.context_tokens or context_of(self.model, order),
            slots=props.slots or slots_of(self.model, order),
            capabilities=props.capabilities.completed_by(capabilities_of_templates(self.parameters.templates or ())),
        )

    @override
    def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        if self._translation is None or not isinstance(payload, chat_pb2.ChatPayload):
            return super().generate(payload, call)
        return self._translated(payload, call)

    async def _translated(self, payload: chat_pb2.ChatPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        async with aclosing(super().generate(await self._sent(payload), call)) as frames:
            async for frame in frames:
                yield frame

    @override
    async def tokenize(self, payload: tokenize_pb2.TokenizePayload, call: CallInfo) -> tokenize_pb2.TokenizeResult:
        if payload.HasField("chat"):
            payload = tokenize_pb2.TokenizePayload(chat=await self._sent(payload.chat), with_pieces=payload.with_pieces)
        return await super().tokenize(payload, call)

    async def _sent(self, chat: chat_pb2.ChatPayload) -> chat_pb2.ChatPayload:
        if self._translation is None:
            return chat
        return await rendered_translation(chat, self._translation, self.parameters, self._sandbox.render)

    @override
    async def stop(self) -> None:
        self._slot_count = None
        try:
            await super().stop()
        finally:
            await self._sandbox.stop()


class _Adapter(msgspec.Struct):
    id: int


async def _require_adapters(http: OpenAiHttp, count: int) -> None:
    """Raises BACKEND_PROTOCOL_ERROR if the server's adapters differ from those it was started with."""
    if not count:
        return
    status, body = await http.call_route("GET", ADAPTERS, ADAPTERS_SECONDS)
    with suppress(*JSON_FAULTS):
        if status == 200 and [one.id for one in msgspec.json.decode(body, type=list[_Adapter])] == list(range(count)):
            return
    raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"the server does not list its {count} adapters (status {status})")
