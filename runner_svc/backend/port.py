"""The backend port: the interface of engines to the runner.

Every implementation passes the suite `weft_testing.conformance.backend`. Payloads and events are generated messages: a
backend is an adapter, and a second translation would only cost time.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from runner_svc.supervise.logs import LogRing
from weft.api.common.v1 import (
    audio_pb2,
    embedding_pb2,
    image_pb2,
    receipt_pb2,
    rerank_pb2,
    tokenize_pb2,
    usage_pb2,
    workflow_pb2,
)
from weft.api.registry.v1 import lease_pb2, runner_pb2
from weft.api.runner.v1 import runner_service_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.gpu.snapshot import ProcessId
from weft.kernel.abilities import UNKNOWN, Abilities
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.load_parameters import LoadParameter, LoadValue, check_parameters
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft.kernel.value import value_class


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """Facts about a loaded model."""

    operations: frozenset[Operation]
    context_tokens: int
    """Context of one slot, prompt and answer together; 0: unknown."""
    slots: int = 0
    """Number of concurrent requests; 0: as configured."""
    abilities: Abilities = UNKNOWN
    """What the model takes, as the engine shows it."""


def _nothing() -> None:
    """The default of a callback: nothing is called."""


def _accept(payload: object) -> None:
    """The check of a payload that may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSigns:
    """A sample of an engine's processes."""

    cpu_seconds: float
    """User and system time of the whole process tree so far. It may fall when a child ends."""
    gpu_seconds: float | None = None
    """GPU time of the tree so far; None: it cannot be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReport:
    """How an engine ended on its own."""

    reason: Reason
    """SERVER_DIED or OUT_OF_MEMORY; CONNECT_FAILED for a server that weft did not start and that does not answer."""
    how: str
    """Text for people: "exit code 1", "signal SIGKILL", and advice."""
    exit: str = ""
    """The same without advice; empty: weft did not start it."""


class CacheIsolation(IntEnum):
    """How prefixes of different tenants are isolated; numbers as in `runner.v1.CacheIsolation`."""

    SLOTS = 1
    WHOLE = 2
    SALT = 3
    NONE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """The options of one start of a backend; the default is as configured."""

    shares: tuple[lease_pb2.DeviceBytes, ...] | None = None
    """Its memory on each device that it may use, in order of their index; None: the host has no memory ledger."""
    hides_devices: bool = False
    """Whether other devices are hidden from it (CUDA_VISIBLE_DEVICES); False for declared devices."""
    parameters: Mapping[str, LoadValue] = field(default_factory=dict)
    """Validated values of its `load_parameters`."""
    model_path: Path | None = None
    """File of another quantization than the configured one."""
    host_limit_bytes: int | None = field(default=None, compare=False)
    """Limit of the host's memory for each process of the engine; None: there is none."""

    def needs_same_process(self, other: "LoadOrder") -> bool:
        """Whether a process that was started for one of two orders serves the other: same devices, same parameters."""
        mine, others = ([share.device_index for share in order.shares or ()] for order in (self, other))
        return (mine, self.parameters, self.model_path) == (others, other.parameters, other.model_path)


@value_class(kw_only=True)
class CacheUse:
    """The use of the prefix cache by one request; by default the engine decides."""

    slot: int | None = None
    """Slot of the engine for the request; None: any."""
    fresh: bool = False
    """Whether the cached prefix must not be used: it is another tenant's, or the request forbids it."""
    salt: str = ""
    """The salt for a server with CacheIsolation.SALT; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasedCache:
    """The erased part of a prefix cache."""

    entry_count: int
    token_count: int | None = None
    """None: unknown."""


@value_class(kw_only=True)
class CallInfo:
    """The context of a request for a backend: callbacks and options."""

    request_id: str
    traceparent: str
    on_token: Callable[[], None] = _nothing
    """Called for every token of the engine, also one that cannot be shown yet; once per read is enough."""
    on_prefill: Callable[[], None] = _nothing
    """Called for every prefill report of the engine."""
    cache: CacheUse = CacheUse()
    adapter: str = ""
    """The adapter of the model that answers, by its name; empty: the model itself."""
    answer_by: float | None = None
    """Deadline of the caller, on the event loop's clock; None: unknown."""
    workflow: workflow_pb2.Workflow | None = None
    """The workflow that makes the images, for backends with `takes_workflows`; None: none is named. Read-only."""
    whole: bool = False
    """Whether the answer is not streamed to its caller, so that events that arrive together may stay in one frame."""
    joins_texts: bool = False
    """Whether texts that arrive together may become one delta, see `Delta.piece_lengths`."""
    ends_loops: bool = False
    """Whether an answer in which the engine itself detects a loop ends with REPEATED_LINE_LOOP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingResult:
    """Vectors in input order, and their usage."""

    embeddings: list[embedding_pb2.Embedding]
    usage: usage_pb2.Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankResult:
    """Scores, the best first, and their usage."""

    scores: list[rerank_pb2.RerankScore]
    usage: usage_pb2.Usage


@dataclass(frozen=True, slots=True)
class SpeechPart:
    """A part of a recording, at least one byte, and the media type of the recording; or the end of it."""

    data: bytes
    media_type: str
    receipt: receipt_pb2.Receipt | None = None
    """The engine's part of the receipt, in a last part without data; None: the engine reports none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSnapshot:
    """A sample of one slot of an engine."""

    number: int
    is_busy: bool
    is_empty: bool
    """Whether its cache is empty."""
    task: int | None
    """Its present or last task; None: unknown, or none yet."""
    token_count: int = 0
    """Tokens that it has cached; 0: none, or unknown."""


@dataclass(slots=True)
class EnginePage:
    """The metrics page of an engine as it was last read; one object for all servers of a backend."""

    text: str = ""
    """Empty: there is none, or it is too old."""
    failed_count: int = 0
    """Reads that failed: no answer, another status than 200, or a page beyond the bound."""


class Backend(Protocol):
    """One engine with one model. Life cycle: start, (generate | embed)*, stop; start again after a stop.

    What an engine lacks is inherited from here: no process, no load parameters, no slots, UNSUPPORTED_OPERATION.
    """

    log: LogRing
    """The engine's output across restarts; empty where weft does not own the engine."""

    takes_workflows: bool = False
    """Whether requests for images may have a workflow."""

    @property
    def process_id(self) -> int | None:
        """Id of the engine's main process; None: there is none, or weft does not own it."""
        return None

    @property
    def containment(self) -> str:
        """The containment of the engine's processes, such as "process group"; empty: weft does not own them."""
        return ""

    @property
    def load_parameters(self) -> Sequence[LoadParameter]:
        """The parameters that `LoadOrder.parameters` may have."""
        return ()

    def check_load(self, parameters: Mapping[str, LoadValue], field: str = "parameters") -> None:
        """Raise INVALID_ARGUMENT naming the parameter for values with which the engine cannot start."""
        check_parameters(parameters, self.load_parameters, field)

    @property
    def cache_isolation(self) -> CacheIsolation:
        """How it can isolate prefixes of different tenants."""
        return CacheIsolation.NONE

    @property
    def slot_count(self) -> int:
        """Number of slots that each keep the prefix of their last request; 0: it does not run, or reports none."""
        return 0

    async def slot_snapshots(self) -> Sequence[SlotSnapshot]:
        """Returns its present slots; empty: it does not report them in time. Never raises."""
        return ()

    async def erase_cache(self, slots: Sequence[int] | None = None) -> ErasedCache:
        """Erase the prefix cache of these slots, once they are free; None: of all slots.

        Raises UNSUPPORTED_OPERATION where the engine cannot do that, and as `generate` when it fails.
        """
        raise WeftError(Reason.UNSUPPORTED_OPERATION, "this server cannot be told to forget what it has cached")

    @property
    def kept_prompt_bytes(self) -> int:
        """Memory of the host for prompts that no slot holds; 0: the engine cannot save them, or is told not to."""
        return 0

    async def save_slot(self, slot: int, name: str) -> int:
        """Save what a slot has cached, once it is free, under a name. Returns its bytes. Raises as `generate`."""
        raise WeftError(Reason.UNSUPPORTED_OPERATION, "this server cannot save what it has cached")

    async def restore_slot(self, slot: int, name: str) -> None:
        """Put what was saved under a name in a slot, in place of its content. Raises as `generate`."""
        raise WeftError(Reason.UNSUPPORTED_OPERATION, "this server cannot restore what it had cached")

    def delete_saved(self, names: Sequence[str]) -> None:
        """Delete what was saved under these names; names that are not there are ignored."""
        del names

    def processes(self) -> tuple[ProcessId, ...]:
        """Returns the present processes of the engine; empty: there are none, or weft does not own them."""
        return ()

    def resident_bytes(self) -> int | None:
        """Returns the main memory in which these processes are resident; None: there are none, or it is unknown."""
        return None

    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        """Start the engine and return once it answers requests; None: as configured.

        Raises LOAD_STALLED when it is not ready in time, SERVER_DIED when it exits first (the message has its last
        log lines), OUT_OF_MEMORY when that was for want of memory, CONNECT_FAILED when it cannot be started at all.
        Leaves no process behind when it raises or is cancelled.
        """
        ...

    def load_progress(self) -> float | None:
        """Returns the loaded share of the model, 0 to 1; None: it is not loading, or does not report it."""
        return None

    @property
    def engine_load(self) -> runner_pb2.EngineLoad | None:
        """Its own figures of its load, as last sampled; None: it runs not, or reports none."""
        return None

    @property
    def engine_page(self) -> EnginePage | None:
        """Its page of metrics as last read; None: it has no such page."""
        return None

    def signs(self) -> ProcessSigns | None:
        """Returns a sample of the engine's processes; None: there are none, or weft does not own them."""
        return None

    async def responds(self, timeout_seconds: float) -> bool:
        """Whether the engine answers a probe. Never raises, and takes little longer than the timeout.

        An answer proves little; an engine without an answer and without signs of work is frozen.
        """
        ...

    async def engine_claims(self) -> Sequence[runner_service_pb2.EngineClaim]:
        """Returns what is claimed of the engine, with what is seen of it now; empty: nothing is claimed.

        Takes some seconds, and never raises for an engine that does not keep a claim.
        """
        return ()

    async def wait_exit(self) -> ExitReport:
        """Return when the engine's process has ended on its own.

        Returns only for a process that `start` reported ready; not for `stop`.
        """
        ...

    async def sleep(self) -> bool:
        """Free the engine's accelerator memory and keep its process, which the next `start` wakes. Never raises.

        Called without running requests. False: it cannot do that now, and must be ended instead.
        """
        return False

    async def stop(self) -> None:
        """End the engine and everything it started. Idempotent; bounded by the backend's own grace periods."""
        ...

    def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        """Run one generation.

        Yields frames of `delta`, `progress`, `warning` and `usage` events: the first content alone except for prefill
        reports (unless `call.whole`), then events as they arrive. Warnings about unsupported parameters precede all
        content. The last event of the last frame is `finished`, whose receipt has usage, gpu_time and tokens_per_second
        as the engine reported them; every choice has its finish reason by then.
        Raises SERVER_DIED, OUT_OF_MEMORY, CONNECT_FAILED, HEADERS_TIMEOUT, BACKEND_REJECTED, CONTEXT_LENGTH_EXCEEDED,
        INVALID_ARGUMENT, BACKEND_ERROR, BACKEND_PROTOCOL_ERROR or, with `call.ends_loops`, REPEATED_LINE_LOOP. It has
        no timeout for silence: the runner's watchdog has, through the callbacks of `call`. Closing the generator
        cancels the engine's work on it.
        """
        ...

    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: CallInfo) -> EmbeddingResult:
        """Embed every input. This and all calls below raise as `generate`, and UNSUPPORTED_OPERATION."""
        raise not_offered(Operation.EMBEDDING)

    async def tokenize(self, payload: tokenize_pb2.TokenizePayload, call: CallInfo) -> tokenize_pb2.TokenizeResult:
        """Returns the tokens of a text or a conversation as for a generation, without waiting for a slot.

        `max_context_tokens` is 0 where the engine does not report it.
        """
        raise not_offered(Operation.TOKENIZE)

    async def rerank(self, payload: rerank_pb2.RerankPayload, call: CallInfo) -> RerankResult:
        """Returns one score per document by its likeness to the query, or those of the best `top_n`."""
        raise not_offered(Operation.RERANK)

    def generate_images(self, payload: image_pb2.ImagePayload, call: CallInfo) -> AsyncGenerator[Frame]:
        """Make images.

        Yields frames of `work_progress`, `partial_image`, `image` and `warning` events; calls `call.on_prefill` for
        progress. The last event of the last frame is `finished`, as of `generate`; its usage counts steps and pixels
        where they are known. Closing the generator cancels the engine's work at its next step.
        """
        raise not_offered(Operation.IMAGE)

    def transcribe(self, payload: audio_pb2.TranscriptionPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        """Transcribe a recording, as `generate_images` makes images: `transcript` events in the order of the recording.

        Closing the generator cancels the engine's work at its next segment.
        """
        raise not_offered(Operation.TRANSCRIPTION)

    def speak(self, payload: audio_pb2.SpeechPayload, call: CallInfo) -> AsyncGenerator[SpeechPart]:
        """Yields the recording as it is generated. Closing the generator cancels the engine's work on it."""
        raise not_offered(Operation.SPEECH)

    def log_lines(self, count: int) -> list[str]:
        """Returns the last lines of the engine's output, oldest first, across restarts."""
        return self.log.last(count)


def not_offered(operation: Operation) -> WeftError:
    """Returns the error of an engine that lacks an operation."""
    return WeftError(Reason.UNSUPPORTED_OPERATION, f"this engine does not offer {operation.name.lower()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMethod:
    """The method of a backend for one operation."""

    name: str
    check: Callable[[Any], None] = _accept
    """Raises INVALID_ARGUMENT for a payload without content."""
    uses_cache: bool = False
    """Whether engines cache its texts as they cache prompts."""


def _required(field: str) -> Callable[[Any], None]:
    def check(payload: Any) -> None:
        if not getattr(payload, field):
            raise invalid_field(f"payload.{field}", "must not be empty")

    return check


def _require_audio(payload: audio_pb2.TranscriptionPayload) -> None:
    if not payload.audio.data:
        raise invalid_field("payload.audio", "must not be empty")


def _require_text_or_chat(payload: tokenize_pb2.TokenizePayload) -> None:
    if payload.WhichOneof("kind") is None:
        raise invalid_field("payload", "must have a text or a chat")


ENGINE_METHODS: Mapping[Operation, EngineMethod] = MappingProxyType(
    {
        Operation.EMBEDDING: EngineMethod(name="embed", check=_required("inputs"), uses_cache=True),
        Operation.RERANK: EngineMethod(name="rerank", check=_required("documents"), uses_cache=True),
        Operation.TOKENIZE: EngineMethod(name="tokenize", check=_require_text_or_chat),
        Operation.IMAGE: EngineMethod(name="generate_images"),
        Operation.TRANSCRIPTION: EngineMethod(name="transcribe", check=_require_audio),
        Operation.SPEECH: EngineMethod(name="speak"),
    }
)
"""The operations beside generations. A unary method returns the result's message, or an object with the field of the
response that has the result, and `usage`."""
