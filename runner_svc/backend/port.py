"""The backend port: the interface between the runner and its engines.

Every implementation passes the suite `weft_testing.conformance.backend`. Payloads and events are generated messages,
which avoids a second translation.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from runner_svc.backend.prefix_reports import PrefixReports
from runner_svc.policy.engine_blocks import PromptPrefixes
from runner_svc.policy.progress import EngineUsage
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
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.load_parameters import LoadParameter, LoadValue, check_parameters
from weft.kernel.requests.capabilities import UNKNOWN, Capabilities
from weft.kernel.requests.request_values import Operation
from weft.kernel.values.fast_dataclass import fast_dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """Properties of a loaded model."""

    operations: frozenset[Operation]
    context_tokens: int
    """Context of one slot, for prompt and answer together; 0: unknown."""
    slots: int = 0
    """Number of concurrent requests; 0: as configured."""
    capabilities: Capabilities = UNKNOWN
    """The model's capabilities as the engine reports them."""


def _nothing() -> None:
    """Default of the callbacks."""


def _accept(payload: object) -> None:
    """Check that accepts every payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReport:
    """How an engine ended without being stopped."""

    reason: Reason
    """SERVER_DIED or OUT_OF_MEMORY; CONNECT_FAILED for an external server that does not respond."""
    how: str
    """Description for people: "exit code 1", "signal SIGKILL", with advice."""
    exit: str = ""
    """The description without advice; empty: an external server."""


class CacheIsolation(IntEnum):
    """How prefixes of different tenants are isolated; values as in `runner.v1.CacheIsolation`."""

    SLOTS = 1
    WHOLE = 2
    SALT = 3
    NONE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """Options for starting a backend; the defaults are the configured values."""

    shares: tuple[lease_pb2.DeviceBytes, ...] | None = None
    """Memory on each allowed device, by device index; None: the host has no memory ledger."""
    hides_devices: bool = False
    """Whether other devices are hidden with CUDA_VISIBLE_DEVICES; False for declared devices."""
    parameters: Mapping[str, LoadValue] = field(default_factory=dict)
    """Validated values of `load_parameters`."""
    model_path: Path | None = None
    """File of another quantization than the configured one; None: the configured file."""
    host_limit_bytes: int | None = field(default=None, compare=False)
    """Main memory limit of each engine process; None: unlimited."""

    def needs_same_process(self, other: "LoadOrder") -> bool:
        """Whether a process started for one of the orders serves the other: same devices, parameters and file."""
        mine, others = ([share.device_index for share in order.shares or ()] for order in (self, other))
        return (mine, self.parameters, self.model_path) == (others, other.parameters, other.model_path)


@fast_dataclass(kw_only=True)
class CacheUse:
    """Prefix cache use of a request; by default the engine decides."""

    slot: int | None = None
    """Engine slot for the request; None: any."""
    fresh: bool = False
    """Whether cached prefixes must not be used: they belong to another tenant, or the request forbids it."""
    salt: str = ""
    """Cache salt for a server with CacheIsolation.SALT; empty: none."""
    session: str = ""
    """Id under which the server reports the blocks of the request; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasedCache:
    """The part of a prefix cache that was erased."""

    entry_count: int
    token_count: int | None = None


@fast_dataclass(kw_only=True)
class CallInfo:
    """Context of a request for a backend: callbacks and options."""

    request_id: str
    traceparent: str
    on_token: Callable[[], None] = _nothing
    """Called for tokens of the engine, including those that cannot be shown yet; once per read is enough."""
    on_prefill: Callable[[], None] = _nothing
    """Called for each prefill report of the engine."""
    cache: CacheUse = CacheUse()
    prefixes: PromptPrefixes | None = None
    """The prefixes of its prompt, if the engine reports which ones it has cached; None: unknown."""
    adapter: str = ""
    """Name of the model's adapter to use; empty: the base model."""
    answer_by: float | None = None
    """Deadline of the caller, in event loop time; None: unknown."""
    workflow: workflow_pb2.Workflow | None = None
    """Workflow for an image request, for backends with `takes_workflows`; None: no workflow. Read-only."""
    whole: bool = False
    """Whether the answer is not streamed to its caller, so that events that arrive together may stay in one frame."""
    joins_texts: bool = False
    """Whether texts that arrive together may become one delta, see `Delta.piece_lengths`."""
    ends_loops: bool = False
    """Whether the answer ends with REPEATED_LINE_LOOP if the engine detects a loop."""
    provider_headers: Mapping[str, str] = field(default_factory=dict)
    """Headers for a provider, as in AliasManifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingResult:
    """Vectors in input order, and their usage."""

    embeddings: list[embedding_pb2.Embedding]
    usage: usage_pb2.Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankResult:
    """Scores in descending order, and their usage."""

    scores: list[rerank_pb2.RerankScore]
    usage: usage_pb2.Usage


@dataclass(frozen=True, slots=True)
class SpeechPart:
    """A part of a recording (at least one byte) and its media type, or the end of the recording."""

    data: bytes
    media_type: str
    receipt: receipt_pb2.Receipt | None = None
    """The engine's part of the receipt, in a last part without data; None: the engine reports none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSnapshot:
    """State of an engine slot."""

    number: int
    is_busy: bool
    is_empty: bool
    """Whether its cache is empty."""
    task: int | None
    """Current or last task; None: unknown, or none yet."""
    token_count: int = 0
    """Number of cached tokens; 0: none, or unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSlot:
    """What was saved of an engine slot."""

    byte_count: int = 0
    """0: nothing was saved."""
    token_count: int = 0
    """0: unknown."""


@dataclass(slots=True)
class EnginePage:
    """The last metrics page of an engine; shared by all servers of a backend."""

    text: str = ""
    """Empty: there is no page, or it is too old."""
    failed_count: int = 0
    """Number of failed reads: no response, a status other than 200, or a page that is too large."""


class Backend(Protocol):
    """An engine with one model. Life cycle: start, (generate | embed)*, stop; it can start again after a stop.

    The defaults describe an engine without process, load parameters and slots; operations raise UNSUPPORTED_OPERATION.
    """

    log: LogRing
    """The engine's output across restarts; empty if weft does not run the engine."""

    takes_workflows: bool = False
    """Whether image requests may use a workflow."""

    @property
    def process_id(self) -> int | None:
        """Id of the engine's main process; None: it is not running, or weft does not run it."""
        return None

    @property
    def containment(self) -> str:
        """How the engine's processes are contained, such as "process group"; empty: weft does not run them."""
        return ""

    @property
    def load_parameters(self) -> Sequence[LoadParameter]:
        """The parameters that `LoadOrder.parameters` may have."""
        return ()

    def check_load(self, parameters: Mapping[str, LoadValue], field: str = "parameters") -> None:
        """Raises INVALID_ARGUMENT naming the parameter for values with which the engine cannot start."""
        check_parameters(parameters, self.load_parameters, field)

    @property
    def cache_isolation(self) -> CacheIsolation:
        """How the engine can isolate prefixes of different tenants."""
        return CacheIsolation.NONE

    @property
    def slot_count(self) -> int:
        """Number of slots, each of which keeps the prefix of its last request; 0: not running, or not reported."""
        return 0

    async def slot_snapshots(self) -> Sequence[SlotSnapshot]:
        """Returns the current slots; empty: the engine does not report them in time. Never raises."""
        return ()

    async def erase_cache(self, slots: Sequence[int] | None = None) -> ErasedCache:
        """Erases the prefix cache of these slots once they are free; None: of all slots.

        Raises UNSUPPORTED_OPERATION if the engine cannot do that, and as `generate` if it fails.
        """
        raise WeftError(Reason.UNSUPPORTED_OPERATION, "this server cannot flush its cache")

    @property
    def prefix_reports(self) -> PrefixReports | None:
        """What the engine reports about the prefixes in its cache; None: it reports nothing."""
        return None

    @property
    def kept_prompt_bytes(self) -> int:
        """Main memory for prompts that lose their slot; 0: the engine cannot save them, or saving is disabled."""
        return 0

    async def save_slot(self, slot: int, name: str) -> SavedSlot:
        """Saves a slot's cache under a name once the slot is free. Raises as `generate`."""
        raise WeftError(Reason.UNSUPPORTED_OPERATION, "this server cannot save its cache")

    async def restore_slot(self, slot: int, name: str) -> None:
        """Replaces a slot's cache with the one saved under a name. Raises as `generate`."""
        raise WeftError(Reason.UNSUPPORTED_OPERATION, "this server cannot restore its cache")

    def delete_saved(self, names: Sequence[str]) -> None:
        """Deletes saved caches; unknown names are ignored."""
        del names

    @property
    def state_kind(self) -> str:
        """Digest of the engine's build and settings, which is the same on all machines; empty: unknown.

        Engines with the same one and the same model file can restore each other's saved caches.
        """
        return ""

    @property
    def state_identity(self) -> str:
        """Digest of all that must be equal for another process to restore its saved caches; empty: none can."""
        return ""

    def saved_file(self, name: str) -> Path | None:
        """Returns the file of a saved cache; None: there is none."""
        return None

    def processes(self) -> tuple[ProcessId, ...]:
        """Returns the running processes of the engine; empty: there are none, or weft does not run them."""
        return ()

    def resident_bytes(self) -> int | None:
        """Returns the resident memory of these processes; None: there are none, or it is unknown."""
        return None

    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        """Starts the engine and returns once it accepts requests; None: as configured.

        Raises LOAD_STALLED if it is not ready in time, SERVER_DIED if it exits first (the message has its last log
        lines), OUT_OF_MEMORY if lack of memory was the cause, and CONNECT_FAILED if it cannot be started. Leaves no
        process behind when it raises or is cancelled.
        """
        ...

    def load_progress(self) -> float | None:
        """Returns the loaded share of the model, 0 to 1; None: it is not loading, or does not report it."""
        return None

    @property
    def engine_load(self) -> runner_pb2.EngineLoad | None:
        """The engine's own load figures, as last sampled; None: it is not running, or reports none."""
        return None

    @property
    def engine_page(self) -> EnginePage | None:
        """The engine's last metrics page; None: it has no such page."""
        return None

    def signs(self) -> EngineUsage | None:
        """Returns CPU and GPU time of the engine's processes; None: there are none, or weft does not run them."""
        return None

    async def responds(self, timeout_seconds: float) -> bool:
        """Whether the engine answers a probe. Never raises, and takes little longer than the timeout.

        An answer proves little, but an engine without an answer and without signs of work is frozen.
        """
        ...

    async def engine_claims(self) -> Sequence[runner_service_pb2.EngineClaim]:
        """Checks the configured claims about the engine and returns them with the findings; empty: there are no claims.

        Takes some seconds. Never raises for a claim that does not hold.
        """
        return ()

    async def wait_exit(self) -> ExitReport:
        """Returns when the engine's process has ended without being stopped.

        Applies only to a process that `start` reported ready. Does not return after `stop`.
        """
        ...

    async def sleep(self) -> bool:
        """Frees the accelerator memory but keeps the process, which the next `start` wakes. Never raises.

        Called without running requests. False: not possible now, the process must be stopped instead.
        """
        return False

    async def stop(self) -> None:
        """Ends the engine and everything it started. Idempotent; bounded by the backend's grace periods."""
        ...

    def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        """Runs a generation.

        Yields frames of `delta`, `progress`, `warning` and `usage` events: the first content alone except for prefill
        reports (unless `call.whole`), then events as they arrive. Warnings about unsupported parameters precede all
        content. The last event of the last frame is `finished`, whose receipt has usage, gpu_time and tokens_per_second
        as the engine reported them; by then every choice has a finish reason.
        Raises SERVER_DIED, OUT_OF_MEMORY, CONNECT_FAILED, HEADERS_TIMEOUT, BACKEND_REJECTED, CONTEXT_LENGTH_EXCEEDED,
        INVALID_ARGUMENT, BACKEND_ERROR, BACKEND_PROTOCOL_ERROR or, with `call.ends_loops`, REPEATED_LINE_LOOP. There is
        no timeout for silence: the runner's watchdog handles it through the callbacks of `call`. Closing the generator
        cancels the request in the engine.
        """
        ...

    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: CallInfo) -> EmbeddingResult:
        """Embeds every input. This and all calls below raise as `generate`, and UNSUPPORTED_OPERATION."""
        raise not_offered(Operation.EMBEDDING)

    async def tokenize(self, payload: tokenize_pb2.TokenizePayload, call: CallInfo) -> tokenize_pb2.TokenizeResult:
        """Returns the tokens of a text or a conversation as in a generation, without waiting for a slot.

        `max_context_tokens` is 0 if the engine does not report it.
        """
        raise not_offered(Operation.TOKENIZE)

    async def rerank(self, payload: rerank_pb2.RerankPayload, call: CallInfo) -> RerankResult:
        """Returns a similarity score to the query for each document, or for the best `top_n`."""
        raise not_offered(Operation.RERANK)

    def generate_images(self, payload: image_pb2.ImagePayload, call: CallInfo) -> AsyncGenerator[Frame]:
        """Generates images.

        Yields frames of `work_progress`, `partial_image`, `image` and `warning` events; calls `call.on_prefill` for
        progress. The last event of the last frame is `finished` as in `generate`; its usage has the steps and pixels if
        known. Closing the generator cancels the request at the engine's next step.
        """
        raise not_offered(Operation.IMAGE)

    def transcribe(self, payload: audio_pb2.TranscriptionPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        """Transcribes a recording. Like `generate_images`, but with `transcript` events in the order of the recording.

        Closing the generator cancels the request at the engine's next segment.
        """
        raise not_offered(Operation.TRANSCRIPTION)

    def speak(self, payload: audio_pb2.SpeechPayload, call: CallInfo) -> AsyncGenerator[SpeechPart]:
        """Streams speech. Closing the generator cancels the request in the engine."""
        raise not_offered(Operation.SPEECH)

    def log_lines(self, count: int) -> list[str]:
        """Returns the last lines of the engine's output, oldest first, across restarts."""
        return self.log.last(count)


def not_offered(operation: Operation) -> WeftError:
    """Returns the error for an operation that the engine lacks."""
    return WeftError(Reason.UNSUPPORTED_OPERATION, f"this engine does not offer {operation.name.lower()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMethod:
    """The backend method for an operation."""

    name: str
    check: Callable[[Any], None] = _accept
    """Raises INVALID_ARGUMENT for a payload without content."""
    uses_cache: bool = False
    """Whether engines cache its texts like prompts."""


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
"""The operations other than generations. A unary method returns the result message, or an object with `usage` and a
field named like that of the response."""
