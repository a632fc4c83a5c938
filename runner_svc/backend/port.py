"""The backend port: what a runner asks of an engine.

`weft_testing.conformance.backend` is the suite every implementation passes. Payloads and events are the generated
messages: a backend is an adapter, and translating twice would only cost time.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from runner_svc.policy.load_plan import LoadParameter, LoadValue
from runner_svc.supervise.logs import LogRing
from weft.api.common.v1 import audio_pb2, embedding_pb2, image_pb2, rerank_pb2, tokenize_pb2, usage_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.gpu.snapshot import ProcessId
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """What is known about the model once it is loaded."""

    operations: frozenset[Operation]
    context_tokens: int
    """Context of one slot, prompt and answer together; 0: unknown."""
    slots: int = 0
    """Requests it works on at once; 0: as configured."""


def _nothing() -> None:
    """The default of a callback: nothing is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSigns:
    """What can be seen of an engine's processes at one moment."""

    cpu_seconds: float
    """Processor time of the whole tree so far, user and system. It may fall when a child ends."""
    gpu_seconds: float | None = None
    """GPU time of the tree so far; None: cannot be measured here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReport:
    """How an engine ended by itself."""

    reason: Reason
    """SERVER_DIED or OUT_OF_MEMORY; CONNECT_FAILED for a server that is not ours and stopped answering."""
    how: str
    """For people: "exit code 1", "signal SIGKILL", and what may help."""


class CacheIsolation(IntEnum):
    """How prefixes of different tenants are kept apart; numbers as in `runner.v1.CacheIsolation`."""

    SLOTS = 1
    WHOLE = 2
    SALT = 3
    NONE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    """The part of one device that a load may use."""

    index: int
    """Its number on the host, in the order of the PCI bus."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """How a backend is started this time; the default is as it is configured."""

    shares: tuple[DeviceShare, ...] | None = None
    """The devices that it may use, in order of their index; None: no ledger of devices is kept here."""
    hides_devices: bool = False
    """Whether other devices are to be hidden from it (CUDA_VISIBLE_DEVICES); not so for declared ones."""
    parameters: Mapping[str, LoadValue] = field(default_factory=dict)
    """Checked values of its `load_parameters`."""
    model_path: Path | None = None
    """Another file than the one configured: a variant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """How one request uses the prefix cache; the default is as the engine likes."""

    slot: int | None = None
    """The engine's slot that it must work in; None: any."""
    fresh: bool = False
    """Nothing that is cached there may be used for it: it is another tenant's, or the request says so."""
    salt: str = ""
    """The salt for a server with CacheIsolation.SALT; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasedCache:
    """What was forgotten."""

    entry_count: int
    token_count: int | None = None
    """None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInfo:
    """What a backend may pass on about the request it works on."""

    request_id: str
    traceparent: str
    on_token: Callable[[], None] = _nothing
    """To be called for every token the engine sends, whether it can be shown yet or not: once per read is enough."""
    on_prefill: Callable[[], None] = _nothing
    """To be called for every report of the engine that it works on the prompt."""
    cache: CacheUse = field(default_factory=CacheUse)
    answer_by: float | None = None
    """When the caller gives up, on the event loop's clock; None: it does not say."""
    whole: bool = False
    """Whether the answer is not streamed to its caller: what arrives together may stay together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingResult:
    """Vectors in input order and what they cost."""

    embeddings: list[embedding_pb2.Embedding]
    usage: usage_pb2.Usage


@runtime_checkable
class ChecksLoads(Protocol):
    """A backend of which not all values of its load parameters go together."""

    def check_load(self, parameters: Mapping[str, LoadValue], field: str = "parameters") -> None:
        """Raise INVALID_ARGUMENT naming the parameter for values with which it cannot be started."""
        ...


class Backend(Protocol):
    """One engine process with one model. Life cycle: start, (generate | embed)*, stop; start again after a stop."""

    @property
    def process_id(self) -> int | None:
        """Id of the engine's main process; None when there is none."""
        ...

    @property
    def containment(self) -> str:
        """What keeps the engine's processes together, such as "process group"; empty where they are not ours."""
        ...

    @property
    def load_parameters(self) -> Sequence[LoadParameter]:
        """What `LoadOrder.parameters` may hold."""
        ...

    @property
    def cache_isolation(self) -> CacheIsolation:
        """How it can keep prefixes of different tenants apart."""
        ...

    def processes(self) -> tuple[ProcessId, ...]:
        """Every process of the engine right now; empty where there is none, or they are not ours."""
        ...

    async def erase_cache(self, slots: Sequence[int] | None = None) -> ErasedCache:
        """Forget what is cached in these slots, once they are free; None: everywhere.

        Raises UNSUPPORTED_OPERATION where the engine cannot do that, and as `generate` when it fails.
        """
        ...

    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        """Start the engine and return once it answers requests; None: as configured.

        Raises LOAD_STALLED when it is not ready in time, SERVER_DIED when it exits first (the message has its last
        log lines), OUT_OF_MEMORY when that was for want of memory, CONNECT_FAILED when it cannot be started at all.
        Leaves no process behind when it raises or is cancelled.
        """
        ...

    def load_progress(self) -> float | None:
        """Share of the loading that is done, 0 to 1; None when it is not loading or does not report it."""
        ...

    def signs(self) -> ProcessSigns | None:
        """What the engine's processes do right now; None where they are not ours to look at, or there are none."""
        ...

    async def responds(self, timeout_seconds: float) -> bool:
        """Whether the engine answers a cheap question: yes proves little; no, without a sign of work, is a frozen one.

        Never raises, and takes little longer than the timeout.
        """
        ...

    async def wait_exit(self) -> ExitReport:
        """Return when the engine's process has ended by itself, with how.

        Returns only for a process that `start` reported ready; not for `stop`.
        """
        ...

    async def stop(self) -> None:
        """End the engine and everything it started. Idempotent; bounded by the backend's own grace periods."""
        ...

    def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        """Run one generation.

        Yields frames of `delta`, `progress`, `warning` and `usage` events: the first content alone but for reports on
        its prompt (unless `call.whole`), afterwards whatever has arrived; parameters that the engine does not take come
        as warnings, before any content. The last event of the last frame is `finished`, its receipt holding usage,
        gpu_time and tokens_per_second as the engine reported them; every choice has had its finish reason by then.
        Raises SERVER_DIED, OUT_OF_MEMORY, CONNECT_FAILED, HEADERS_TIMEOUT, BACKEND_REJECTED, CONTEXT_LENGTH_EXCEEDED,
        INVALID_ARGUMENT, BACKEND_ERROR or BACKEND_PROTOCOL_ERROR. How long it may be silent is not its business: the
        runner's watchdog looks, by the calls of `call`. Closing the generator stops the engine's work on it.
        """
        ...

    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: CallInfo) -> EmbeddingResult:
        """Embed every input. Raises as `generate`; UNSUPPORTED_OPERATION when the engine gives no embeddings."""
        ...

    @property
    def log(self) -> LogRing:
        """The engine's output across restarts; stays empty where it is not ours to read."""
        ...

    def log_lines(self, count: int) -> list[str]:
        """The last lines of the engine's output, oldest first, across restarts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankResult:
    """Scores, the best first, and what they cost."""

    scores: list[rerank_pb2.RerankScore]
    usage: usage_pb2.Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageResult:
    """Images and what they cost."""

    images: list[image_pb2.GeneratedImage]
    usage: usage_pb2.Usage


@dataclass(frozen=True, slots=True)
class SpeechPart:
    """Bytes of a recording, never none, and the media type of the whole."""

    data: bytes
    media_type: str


@runtime_checkable
class Tokenizes(Protocol):
    """A backend that counts tokens as it would read them."""

    async def tokenize(self, payload: tokenize_pb2.TokenizePayload, call: CallInfo) -> tokenize_pb2.TokenizeResult:
        """The tokens of a text or of a conversation. It waits for no slot of the engine.

        `max_context_tokens` is 0 where the engine does not say it with its tokens.
        """
        ...


@runtime_checkable
class Reranks(Protocol):
    """A backend that compares documents with a query."""

    async def rerank(self, payload: rerank_pb2.RerankPayload, call: CallInfo) -> RerankResult:
        """One score per document, or those of the best `top_n`."""
        ...


@runtime_checkable
class MakesImages(Protocol):
    """A backend that makes images."""

    async def generate_images(self, payload: image_pb2.ImagePayload, call: CallInfo) -> ImageResult:
        """At least one image."""
        ...


@runtime_checkable
class Transcribes(Protocol):
    """A backend that writes down what is said."""

    async def transcribe(self, payload: audio_pb2.TranscriptionPayload, call: CallInfo) -> audio_pb2.Transcription:
        """The text."""
        ...


@runtime_checkable
class Speaks(Protocol):
    """A backend that speaks."""

    def speak(self, payload: audio_pb2.SpeechPayload, call: CallInfo) -> AsyncGenerator[SpeechPart]:
        """The recording as it is made. Closing the generator stops the engine's work on it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSnapshot:
    """One slot of an engine at one moment."""

    number: int
    is_busy: bool
    is_empty: bool
    """Whether it has nothing cached."""
    task: int | None
    """The task that it works on or worked on last; None: unknown, or none yet."""


@runtime_checkable
class SlottedEngine(Protocol):
    """An engine whose slots each keep the prefix of what they last worked on."""

    @property
    def slot_count(self) -> int:
        """The slots it has, by its own word; 0: it does not run, or does not say."""
        ...

    async def slot_snapshots(self) -> Sequence[SlotSnapshot]:
        """Its slots right now; empty where it does not say in time. Never raises."""
        ...
