"""Processes the prompts of agents, and announced ones, after a load while the engine has no requests."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from typing_extensions import override

from runner_svc.backend.port import CallInfo
from runner_svc.cache.manager import CacheManager
from runner_svc.cache.model_cache import RunningTurn, prompt_marks
from runner_svc.chat.chat_request import ChatRequest, ChatSetup
from runner_svc.chat.tool_loop import converse
from runner_svc.instance.instance import Instance
from runner_svc.instance.lifecycle_loop import IdleWork
from runner_svc.policy.cache_directory import Partition
from runner_svc.policy.expected_prefixes import (
    FIRST_STEP_TOKENS,
    MAX_PREFIX_BYTES,
    ExpectedPrefix,
    ExpectedPrefixes,
    next_step_tokens,
)
from runner_svc.policy.kept_prompts import KeptPrompt
from runner_svc.request_records import RequestRecord
from runner_svc.waiting import end_tasks
from weft.api.common.v1 import (
    chat_pb2,
    completion_pb2,
    event_pb2,
    sampling_pb2,
    tokenize_pb2,
    usage_pb2,
    warning_pb2,
)
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.history import SYSTEM_ROLES
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.requests.request_values import CacheMode, Handling, Operation
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.kernel.values.names import DEFAULT_TENANT, new_id

if TYPE_CHECKING:
    from weft.api.registry.v1 import agent_pb2
    from weft.dispatch.fleet import FleetView

REPLACEMENT_CHECK_SECONDS = 0.05
MAX_INTERRUPTIONS = 8
"""Number of interruptions after which a prompt is given up: requests of a busy engine warm it anyway."""
_ANY_MESSAGE = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text=".")])
"""Replaces the caller's message, because some chat templates need one."""

log = get_logger("weft.runner")


class Prewarmer(IdleWork):
    """The expected prompts of one instance. Their processing has no slot and no record, and requests interrupt it."""

    def __init__(
        self,
        instance: Instance,
        caches: CacheManager,
        setups: Mapping[str, ChatSetup],
        mesh: "Callable[[], Awaitable[FleetView]]",
        clock: Clock,
    ) -> None:
        """`setups`: the setup of conversations, by model. `mesh` returns the current agents."""
        self._instance = instance
        self._caches = caches
        self._setups = setups
        self._mesh = mesh
        self._clock = clock
        self._expected = ExpectedPrefixes()
        self._agents: dict[str, agent_pb2.AgentManifest] = {}
        """The agents of the last load."""
        self._work: asyncio.Task[None] | None = None

    @override
    async def note(self, chat: ChatRequest, model: str, tenant: str, handling: Handling) -> Frame:
        now, load = self._clock.monotonic(), self._instance.loader.starts
        partition = Partition(tenant, handling.cache_tag, self._adapter(model))
        uses_cache = handling.cache_mode is not CacheMode.NONE
        if not handling.prefix_seconds:
            if uses_cache and chat.agent:
                self._expected.note(ExpectedPrefix(chat.agent, partition), load, now)
            return []
        if not uses_cache or not self._may_work:
            return _not_kept(
                "weft does not run the engine or cannot interrupt it, or the request does not use its cache"
            )
        beginning = _beginning(chat.payload)
        if beginning is None or beginning.ByteSize() > MAX_PREFIX_BYTES:
            return _not_kept(f"it needs tools or system messages, at most {MAX_PREFIX_BYTES} bytes")
        with suppress(WeftError):  # which ends the conversation too
            content = await rendered(replace(chat, payload=beginning), self._setups[model])
            without_user = chat_pb2.ChatPayload(messages=content.messages[:-1], tools=content.tools)
            prefix = ExpectedPrefix("", partition, prompt_marks(without_user), content)
            self._expected.note(prefix, load, now, now + handling.prefix_seconds)
        return []

    @override
    def expects(self, prompt: KeptPrompt) -> bool:
        return self._expected.announces(prompt.partition, prompt.marks, self._clock.monotonic())

    @override
    def forget(self, tenant: str | None, tag: str | None) -> None:
        self._expected.forget(tenant, tag)

    @override
    async def make_way(self) -> None:
        if self._work is not None:
            await end_tasks(self._work)

    @override
    async def run(self) -> None:
        load = self._instance.loader.starts
        try:
            if not self._may_work:
                return
            # An instance that replaces another one loads beside it, and has no cache of its own yet.
            while not self._caches.has(self._instance):
                await self._clock.sleep(REPLACEMENT_CHECK_SECONDS)
            self._read(await self._mesh())
            while (prefix := self._expected.take_due(load, self._clock.monotonic())) is not None:
                await self._while_idle(prefix)
        except WeftError as error:
            log.debug("agents were not read for prewarming", model=self._instance.model, message=error.log_message)
        except Exception:
            log.exception("prewarming failed", model=self._instance.model)

    @property
    def _may_work(self) -> bool:
        # A server that weft did not start may be warm, and a provider would have to be paid. A prompt without tokens
        # cannot be divided into steps: a request would wait for all of it.
        config = self._instance.config
        divides = Operation.TOKENIZE in config.operations
        return divides and not config.remote and self._instance.backend.process_id is not None

    def _adapter(self, model: str) -> str:
        return "" if model == self._instance.model else model

    def _read(self, view: "FleetView") -> None:
        # A runner without agents does not need the view of a mesh.
        from weft.dispatch.agents import members_of  # noqa: PLC0415

        served = {
            name: (agent.manifest, model.name)
            for name, agent in sorted(view.agents.items())
            for model in members_of(view, agent)
            if model.name in self._instance.names
            and agent.manifest.system_prompt
            and not agent.HasField("inactive_time")
        }
        self._agents = {name: agent for name, (agent, _) in served.items()}
        self._expected.keep_agents(self._agents)
        # With other tenants it is unknown which of them will use an agent, until they do.
        if not view.tenants.keys() - {DEFAULT_TENANT}:
            self._expected.add_unused(
                ExpectedPrefix(name, Partition(DEFAULT_TENANT, adapter=self._adapter(model)))
                for name, (_, model) in served.items()
            )

    async def _while_idle(self, prefix: ExpectedPrefix) -> None:
        """Processes a prompt while the instance has no requests, from its beginning after each interruption."""
        for _ in range(MAX_INTERRUPTIONS):
            while not (idle := self._instance.records.idle).is_set():
                await idle.wait()  # a request may have begun when it returns
            if not self._expected.is_taken(prefix, self._clock.monotonic()):
                return
            self._work = work = asyncio.create_task(self._process(prefix))
            try:
                await asyncio.wait({work})
            finally:
                await end_tasks(work)
                self._work = None
            if not work.cancelled():
                work.result()
                return

    async def _process(self, prefix: ExpectedPrefix) -> None:
        model, payload = prefix.partition.adapter or self._instance.model, prefix.content
        call = CallInfo(request_id=new_id("prewarm"), traceparent="", adapter=prefix.partition.adapter, whole=True)
        try:
            if payload is None and (agent := self._agents.get(prefix.agent)) is not None:
                payload = await rendered(_request(agent, call), self._setups[model])
            if payload is None:
                return
            if payload.ByteSize() > MAX_PREFIX_BYTES:
                log.info("prompt is too long to prewarm", model=model, agent=prefix.agent, bytes=payload.ByteSize())
                return
            turn = await self._caches.ahead(model, prefix.partition, payload)
            if turn is None:
                log.info("engine has no free slot for a prompt", model=model, agent=prefix.agent)
                return
            async with turn:
                token_count = await self._send(payload, turn, call)
        except WeftError as error:
            log.warning("prompt was not prewarmed", model=model, agent=prefix.agent, message=error.log_message)
            return
        self._expected.note_processed(prefix)
        self._caches.note_prewarmed(model, token_count)
        log.info("prompt prewarmed", model=model, agent=prefix.agent, tokens=token_count)

    async def _send(self, payload: chat_pb2.ChatPayload, turn: RunningTurn, call: CallInfo) -> int:
        """Processes a prompt in steps, since an engine can be interrupted only between them. Returns its tokens."""
        counted = await self._instance.backend.tokenize(tokenize_pb2.TokenizePayload(chat=payload), call)
        size, done = FIRST_STEP_TOKENS, 0
        while (done := done + size) < len(counted.ids):
            began = self._clock.monotonic()
            await self._generate(_completion(counted.ids[:done]), replace(call, cache=turn.use))
            turn.worked, turn.use = True, replace(turn.use, fresh=False)
            size = next_step_tokens(size, self._clock.monotonic() - began)
        usage = await self._generate(payload, replace(call, cache=turn.use))
        turn.worked = True
        return usage.prompt_tokens

    async def _generate(self, payload: GenerationPayload, call: CallInfo) -> usage_pb2.Usage:
        last: Frame = []
        async with aclosing(self._instance.backend.generate(payload, call)) as frames:
            async for frame in frames:
                last = frame
        return last[-1].finished.receipt.usage if last else usage_pb2.Usage()


def _not_kept(why: str) -> Frame:
    code = warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER
    warning = warning_pb2.Warning(code=code, field="prefix_keep_alive", message=f"was not used: {why}")
    return [event_pb2.InferenceEvent(warning=warning)]


def _beginning(payload: GenerationPayload) -> chat_pb2.ChatPayload | None:
    """Returns a chat with the tools and first system messages of another one; None: it has none, or is not a chat."""
    if not isinstance(payload, chat_pb2.ChatPayload):
        return None
    systems = list(takewhile(lambda message: message.role in SYSTEM_ROLES, payload.messages))
    if not systems and not payload.tools:
        return None
    chat = chat_pb2.ChatPayload(messages=[*systems, _ANY_MESSAGE], tools=payload.tools)
    chat.reasoning_effort, chat.sampling.max_tokens = payload.reasoning_effort, 1
    if payload.HasField("thinking"):
        chat.thinking = payload.thinking
    chat.extra_parameters.CopyFrom(payload.extra_parameters)
    return chat


def _request(agent: "agent_pb2.AgentManifest", call: CallInfo) -> ChatRequest:
    """Returns a chat that begins like all chats with the agent."""
    from weft.dispatch.agents import with_agent  # noqa: PLC0415 - as above

    chat, _ = with_agent(chat_pb2.ChatPayload(messages=[_ANY_MESSAGE]), agent)
    chat.sampling.max_tokens = 1
    # No tool is run, so none sends data to a remote provider.
    return ChatRequest(payload=chat, call=call, behaviour=agent.behaviour, agent=agent.name, allow_remote=True)


def _completion(tokens: Sequence[int]) -> completion_pb2.CompletionPayload:
    prompt = completion_pb2.PromptInput(tokens=completion_pb2.TokenIds(ids=tokens))
    return completion_pb2.CompletionPayload(prompts=[prompt], sampling=sampling_pb2.SamplingParams(max_tokens=1))


class _RenderedError(Exception):
    """Ends a conversation at its first engine turn, before any tool could run."""


class _NoEngine:
    def __init__(self, clock: Clock) -> None:
        now, at = clock.monotonic(), clock.utc_now()
        self.record = RequestRecord("", "", clock, started=now, started_at=at, last_progress=now)
        self.payload = chat_pb2.ChatPayload()

    def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        del call
        self.payload.MergeFrom(payload)  # type: ignore[arg-type]  # that of a chat
        raise _RenderedError


async def rendered(request: ChatRequest, setup: ChatSetup) -> chat_pb2.ChatPayload:
    """Returns the first engine payload of a chat, with the platform prompt, tools and signals."""
    engine = _NoEngine(setup.clock)
    with suppress(_RenderedError):
        async with aclosing(converse(engine, request, setup)) as frames:
            async for _ in frames:
                pass
    return engine.payload
