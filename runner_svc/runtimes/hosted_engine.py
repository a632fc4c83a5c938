"""The common part of backends whose engine is a library in a host program that the runner starts.

docs/decisions/0011-in-process-engines.md explains the program and its messages. The runner renders chat templates in
its sandbox; the engine receives rendered prompts only.
"""

import asyncio
import sys
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from typing_extensions import override

from runner_svc.backend.devices import hidden_devices
from runner_svc.backend.engine_process import LOADING, WORKING, EngineProcess, ProcessBackend
from runner_svc.backend.port import BackendFacts, CacheIsolation, CallInfo, EmbeddingResult, ErasedCache, LoadOrder
from runner_svc.engine_host.channel import ChannelClosedError, EngineChannel
from runner_svc.engine_host.messages import (
    TOKEN_VARIABLE,
    Answer,
    ChatTemplates,
    Done,
    Embed,
    EngineFigures,
    EngineRequest,
    Forget,
    PromptProgress,
    Ready,
    Sleep,
    Token,
    Tokenize,
    Tokens,
    Vector,
    Wake,
)
from runner_svc.engine_host.request import AnswerReader, PreparedRequest, prepare
from runner_svc.environments.environment import EngineEnvironment
from runner_svc.policy.parameters import EngineParameters
from runner_svc.runtimes.engine_figures import with_sample_time
from runner_svc.runtimes.model_engine import ModelContext, parameter_profile, text_abilities
from runner_svc.runtimes.settings import HostedModelSettings
from runner_svc.supervise.process_time import GpuTime
from runner_svc.templates.sandbox import ModelTemplates, TemplateSandbox, check_templates, read_templates
from weft.api.common.v1 import chat_pb2, embedding_pb2, tokenize_pb2, usage_pb2
from weft.api.registry.v1 import runner_pb2
from weft.dispatch.frames import Frame, GenerationPayload, has_content
from weft.kernel.abilities import Abilities
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

log = get_logger("weft.runner")

ERASE_SECONDS = 30.0
"""Maximum wait for running requests before the cache is erased."""
SLEEP_SECONDS = 30.0
_SHARE_DIGITS = 2
BOOTSTRAP = Path(__file__).parents[1] / "engine_host" / "bootstrap.py"

Settings = TypeVar("Settings", bound=HostedModelSettings)


def host_command(program: str, python: str = sys.executable) -> tuple[str, ...]:
    """Returns the command of a host program, a module of weft's, under an interpreter that has the engine's library."""
    return (python, str(BOOTSTRAP), program)


class HostedBackend(ProcessBackend, Generic[Settings]):
    """A Backend over one host process."""

    program: ClassVar[str]
    """The module of the host program."""
    engine_parameters: ClassVar[EngineParameters]
    missing_library: ClassVar[str]
    """The error for a library that cannot be imported, with its remedy."""
    engine_environment: ClassVar[EngineEnvironment | None] = None
    """The environment of the host program where the runner has no `command`; None: weft's own."""
    sleep_seconds: ClassVar[float] = SLEEP_SECONDS
    """Maximum time in which the engine frees its memory; then it is ended."""
    counts_erased_tokens: ClassVar[bool] = True
    """Whether the engine tells how many tokens of its cache it has erased."""

    def __init__(self, model: Settings, context: ModelContext, gpu: GpuTime | None = None) -> None:
        super().__init__(EngineProcess(context.graces, gpu, context.leftovers))
        self.model = model
        self.context = context
        self.parameters = parameter_profile(model, self.engine_parameters)
        self._sandbox = TemplateSandbox()
        self._templates = ModelTemplates()
        self._channel: EngineChannel | None = None
        self._loading = False
        self._slots, self._free = 1, asyncio.Semaphore(1)
        """One place per running request: admission admits no more, but a cancelled one may still be ending."""
        self._erasing = asyncio.Lock()
        self._started: tuple[LoadOrder, BackendFacts] | None = None
        """The order of the present process, and what became of it; None: none is ready."""
        self._asleep = False

    @abstractmethod
    def arguments(self, order: LoadOrder, socket: Path) -> list[str]:
        """Returns the command line of the host program after its command."""

    def environment(self, order: LoadOrder) -> Mapping[str, str]:
        """Returns environment variables in addition to the runner's."""
        return hidden_devices(order)

    async def model_templates(self, order: LoadOrder) -> ModelTemplates:
        """Returns the chat templates in the model's files, before the engine starts. Raises as `read_templates`."""
        return await read_templates(order.model_path or self.model.file, self.model.chat_template_file)

    def read_line(self, line: str) -> None:
        """Read a line of the engine's output."""

    def sleeps_in_place(self, order: LoadOrder) -> bool:
        """Whether the engine can free its memory and keep its process after such a load, and is configured so."""
        del order
        return False

    @abstractmethod
    def operations(self) -> frozenset[Operation]:
        """Returns the operations that the model offers, if its files have a chat template."""

    def abilities(self, templates: Sequence[str]) -> Abilities:
        """Returns what the loaded model takes, by its chat templates; the engine is given text alone."""
        return text_abilities(templates)

    @override
    def load_progress(self) -> float | None:
        return self._channel.load_share if self._loading and self._channel is not None else None

    async def responds(self, timeout_seconds: float) -> bool:
        """See Backend.responds. Another thread than the engine's answers."""
        channel = self._channel
        return channel is not None and await channel.ping(timeout_seconds)

    @property
    @override
    def engine_load(self) -> runner_pb2.EngineLoad | None:
        figures = None if self._channel is None or self._asleep else self._channel.figures
        # The program sends them whenever they change, so that the last ones are those of now.
        return None if figures is None else with_sample_time(engine_load_of(figures), time.time())

    @property
    @override
    def cache_isolation(self) -> CacheIsolation:
        return CacheIsolation.WHOLE

    async def erase_cache(self, slots: Sequence[int] | None = None) -> ErasedCache:
        """See Backend.erase_cache. The engine's one cache is slot 0; running requests are waited for."""
        channel = self._channel
        if channel is None or (slots is not None and not slots):
            return ErasedCache(entry_count=0, token_count=0)
        count = 0
        try:
            async with (
                asyncio.timeout(ERASE_SECONDS),
                self._all_slots(),
                aclosing(channel.answers_to(Forget(channel.next_id()))) as arrivals,
            ):
                async for answers in arrivals:
                    count += sum(answer.prompt_tokens for answer in answers if isinstance(answer, Done))
        except TimeoutError:
            message = f"the engine was still at work after {ERASE_SECONDS:g} s"
            raise WeftError(Reason.BACKEND_ERROR, message) from None
        except ChannelClosedError:
            raise await self._explain_break() from None
        return ErasedCache(entry_count=int(count > 0), token_count=count if self.counts_erased_tokens else None)

    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        """See Backend.start. Raises also TEMPLATE_FAILED for an unsafe chat template."""
        order = order or LoadOrder()
        self.check_load(order.parameters)
        if (facts := await self._woken(order)) is not None:
            return facts
        self._loading = True
        try:
            self._templates = await self.model_templates(order)
            await check_templates(self._templates, self._sandbox)
            self._channel = channel = EngineChannel(self.missing_library)
            await channel.open()
            # The token is passed in the environment: arguments are visible to every user of the machine.
            environment = {**self.context.environment, **self.environment(order), TOKEN_VARIABLE: channel.token}
            command = [*self._host_command(), *self.arguments(order, channel.path)]
            await self._process.start(command, environment, self.read_line)
            ready = await self._until_ready(channel)
            if ready.templates is not None:
                self._templates = _templates_of(ready.templates, self._templates)
                await check_templates(self._templates, self._sandbox)
        except BaseException:
            await self.stop()
            raise
        finally:
            self._loading = False
        self._slots, self._free = ready.slots, asyncio.Semaphore(ready.slots)
        operations = self.operations() - (frozenset() if self._templates.usual is not None else {Operation.CHAT})
        facts = BackendFacts(
            operations=operations,
            context_tokens=ready.context_tokens,
            slots=ready.slots,
            abilities=self.abilities(self._templates.all),
        )
        self._started = order, facts
        return facts

    @override
    async def sleep(self) -> bool:
        if self._channel is None or self._started is None or not self.sleeps_in_place(self._started[0]):
            return False
        try:
            async with asyncio.timeout(self.sleep_seconds), self._all_slots():
                await self._do(self._channel, Sleep(self._channel.next_id()))
        except (TimeoutError, WeftError, ChannelClosedError) as error:
            log.warning("an engine did not go to sleep", model=self.model.name, message=str(error))
            return False
        self._asleep = True
        return True

    async def _woken(self, order: LoadOrder) -> BackendFacts | None:
        """Wake an engine that sleeps, and return its facts; None: there is none that can be woken for this order."""
        asleep, self._asleep = self._asleep, False
        if not asleep or self._channel is None or self._started is None:
            return None
        channel, (before, facts) = self._channel, self._started
        try:
            if order.needs_same_process(before):
                waking = self._do(channel, Wake(channel.next_id()))
                await self._process.while_loading(waking, self.context.load_stall_seconds)
                self._started = order, facts
                return facts
        except (WeftError, ChannelClosedError) as error:
            log.warning("an engine was not woken and starts again", model=self.model.name, message=str(error))
        except BaseException:
            await self.stop()
            raise
        await self.stop()
        return None

    @override
    async def stop(self) -> None:
        channel, self._channel = self._channel, None
        self._started, self._asleep = None, False
        try:
            await self._process.stop()
        finally:
            if channel is not None:
                await channel.close()
            await self._sandbox.stop()

    @override
    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        channel, call = self._running(), self._process.noting(call)
        prepared = await self.prepared(payload, call)
        if prepared.warnings:
            yield prepared.warnings
        reader, request = AnswerReader(), prepared.request
        request.fresh, request.cache_salt, request.ends_loops = call.cache.fresh, call.cache.salt, call.ends_loops
        request.adapter = call.adapter
        async with self._free:
            request.id = channel.next_id()
            async with aclosing(self._answers(channel, request)) as arrivals:
                async for answers in arrivals:
                    if any(isinstance(answer, Token) for answer in answers):
                        call.on_token()
                    elif any(isinstance(answer, PromptProgress) for answer in answers):
                        call.on_prefill()
                    for number, frame in enumerate(reader.read(answers)):
                        if number and has_content(frame):
                            # The first content stays alone in its frame, also where more arrived with it.
                            call.on_token()
                        yield frame

    async def prepared(self, payload: GenerationPayload, call: CallInfo) -> PreparedRequest:
        """Returns the request for the engine, and the warnings for the caller. Raises as `generate`."""
        del call
        return await prepare(payload, self._templates, self.parameters, self._sandbox.render)

    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: CallInfo) -> EmbeddingResult:
        """See Backend.embed. Token ids and shorter vectors are refused with INVALID_ARGUMENT."""
        channel = self._running()
        if Operation.EMBEDDING not in self.operations():
            raise WeftError(Reason.UNSUPPORTED_OPERATION, "this model is not configured for embeddings")
        if payload.HasField("dimensions"):
            raise invalid_field("dimensions", "this runtime gives vectors of full length only; leave it out")
        for index, item in enumerate(payload.inputs):
            if item.WhichOneof("kind") == "tokens":
                raise invalid_field(f"inputs[{index}]", "this runtime embeds text, not token ids")
        vectors: list[embedding_pb2.Embedding] = []
        usage = usage_pb2.Usage()
        async with self._free:
            request = Embed(id=channel.next_id(), texts=[item.text for item in payload.inputs])
            async with aclosing(self._answers(channel, request)) as arrivals:
                async for answers in arrivals:
                    call.on_prefill()
                    self._process.note_answer()
                    for answer in answers:
                        if isinstance(answer, Vector):
                            vectors.append(embedding_pb2.Embedding(index=answer.index, values=answer.values))
                        elif isinstance(answer, Done):
                            usage.prompt_tokens = answer.prompt_tokens
        return EmbeddingResult(embeddings=vectors, usage=usage)

    async def tokenize(self, payload: tokenize_pb2.TokenizePayload, call: CallInfo) -> tokenize_pb2.TokenizeResult:
        """See Backend.tokenize. The engine does it concurrently with a running request."""
        del call
        channel = self._running()
        if payload.WhichOneof("kind") == "text":
            request = Tokenize(id=channel.next_id(), text=payload.text, add_special=payload.add_special)
        else:
            chat = await prepare(_rendered(payload.chat), self._templates, self.parameters, self._sandbox.render)
            text = str(chat.request.prompts[0])
            request = Tokenize(id=channel.next_id(), text=text, add_special=True, has_template=True)
        request.with_pieces = payload.with_pieces
        result = tokenize_pb2.TokenizeResult()
        async with aclosing(self._answers(channel, request)) as arrivals:
            async for answers in arrivals:
                for answer in answers:
                    if isinstance(answer, Tokens):
                        result.ids.extend(answer.ids)
                        result.pieces.extend(answer.pieces)
        result.count = len(result.ids)
        return result

    def _host_command(self) -> Sequence[str]:
        """Returns the command of the host program. Raises CONNECT_FAILED where its environment is not installed."""
        if self.context.command:
            return self.context.command
        if self.engine_environment is None:
            return host_command(self.program)
        try:
            python = self.context.environments.environment_python(self.engine_environment)
        except WeftError as error:
            raise WeftError(Reason.CONNECT_FAILED, error.message) from error
        return host_command(self.program, str(python))

    async def _answers(self, channel: EngineChannel, request: EngineRequest) -> AsyncGenerator[list[Answer]]:
        """Yields the answers to a request. Raises as Backend.generate where the engine ends meanwhile."""
        try:
            async with aclosing(channel.answers_to(request)) as arrivals:
                async for answers in arrivals:
                    yield answers
        except ChannelClosedError:
            raise await self._explain_break() from None

    async def _do(self, channel: EngineChannel, request: Sleep | Wake) -> None:
        """Return once the engine has done something that has no other answer."""
        async with aclosing(channel.answers_to(request)) as arrivals:
            async for _ in arrivals:
                pass

    @asynccontextmanager
    async def _all_slots(self) -> AsyncGenerator[None]:
        """Hold every slot of the engine, once its running requests have ended."""
        async with self._erasing, AsyncExitStack() as held:
            free = self._free
            for _ in range(self._slots):
                await held.enter_async_context(free)
            yield

    def _running(self) -> EngineChannel:
        if self._channel is None or self._asleep:
            raise WeftError(Reason.BACKEND_NOT_READY, "the engine is not running")
        return self._channel

    async def _until_ready(self, channel: EngineChannel) -> Ready:
        try:
            return await self._process.while_loading(
                channel.ready(), self.context.load_stall_seconds, lambda: channel.load_share
            )
        except ChannelClosedError:
            raise await self._explain_break(LOADING) from None

    async def _explain_break(self, when: str = WORKING) -> WeftError:
        """Returns the error for a closed channel."""
        return await self._process.explain_break(when) or WeftError(
            Reason.BACKEND_PROTOCOL_ERROR, "the engine closed its connection and still runs"
        )


def engine_load_of(figures: EngineFigures) -> runner_pb2.EngineLoad:
    """Returns the figures of an engine as they are reported."""
    return runner_pb2.EngineLoad(
        running_count=figures.running_count,
        waiting_count=figures.waiting_count,
        # In steps, so that a report changes only with the load.
        kv_cache_share=None if figures.kv_cache_share is None else round(figures.kv_cache_share, _SHARE_DIGITS),
        kv_cache_tokens=figures.kv_cache_tokens,
        preemption_count=figures.preemption_count,
        prefix_query_tokens=figures.prefix_query_tokens,
        prefix_hit_tokens=figures.prefix_hit_tokens,
    )


def _templates_of(found: ChatTemplates, override_of: ModelTemplates) -> ModelTemplates:
    """Returns the templates that the engine has found, with what the settings have instead of them."""
    return ModelTemplates(
        usual=override_of.usual or found.usual,
        tool_use=None if override_of.usual else found.tool_use,
        bos_token=found.bos_token,
        eos_token=found.eos_token,
    )


def _rendered(chat: chat_pb2.ChatPayload) -> chat_pb2.ChatPayload:
    """Returns the part of a conversation that its template renders."""
    part = chat_pb2.ChatPayload(
        messages=chat.messages, reasoning_effort=chat.reasoning_effort, extra_parameters=chat.extra_parameters
    )
    if chat.HasField("thinking"):
        part.thinking = chat.thinking
    if chat.tool_choice.mode != chat_pb2.ToolChoice.MODE_NONE:
        part.tools.extend(chat.tools)
    return part
