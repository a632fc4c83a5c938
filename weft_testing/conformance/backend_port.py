"""The Backend port by its shape, and the engines its conformance suite asks for.

The port itself is in `runner_svc.backend.port`, which nothing under `weft` may import.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2, event_pb2, tokenize_pb2, usage_pb2
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

Frame = list[event_pb2.InferenceEvent]
Payload = chat_pb2.ChatPayload | completion_pb2.CompletionPayload

ANSWER_TOKENS = 8
MAX_LOG_BYTES = 2 * 1024 * 1024
"""Output of an engine that exceeds what any backend keeps."""


class Engine(Enum):
    """The kind of engine that a test needs behind its backend."""

    NORMAL = "answers at once; two slots or more; an answer to any prompt has at least ANSWER_TOKENS tokens"
    SLOW = "one slot; an answer lasts 20 s or more, its first token comes within 2 s"
    NEVER_READY = "runs but never becomes ready; the engine gives up within `start_seconds`"
    EXITS_AT_START = "writes a line about the cause and exits with code 3 before it is ready"
    IGNORES_SIGTERM = "as NORMAL, but SIGTERM has no effect"
    NOISY = "as NORMAL, and writes MAX_LOG_BYTES or more to its stderr before it is ready"
    WITH_DESCENDANT = "as NORMAL, with a child process that holds its stdout and stderr open"


class Facts(Protocol):
    """What `start` returns."""

    @property
    def operations(self) -> frozenset[Operation]:
        """What the model can do."""
        ...

    @property
    def context_tokens(self) -> int:
        """Context of one slot; 0: unknown."""
        ...

    @property
    def slots(self) -> int:
        """Maximum number of concurrent requests; 0: as configured."""
        ...


class Embedded(Protocol):
    """What `embed` returns."""

    @property
    def embeddings(self) -> list[embedding_pb2.Embedding]:
        """The vectors, in input order."""
        ...

    @property
    def usage(self) -> usage_pb2.Usage:
        """Their token usage."""
        ...


class Exit(Protocol):
    """What `wait_exit` returns."""

    @property
    def reason(self) -> Reason:
        """SERVER_DIED, OUT_OF_MEMORY, or CONNECT_FAILED for a server that the backend did not start."""
        ...

    @property
    def how(self) -> str:
        """Description of the end, such as the signal."""
        ...


class Signs(Protocol):
    """What `signs` returns."""

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the process tree."""
        ...

    @property
    def gpu_seconds(self) -> float | None:
        """GPU time of the process tree; None: unknown."""
        ...


class Parameter(Protocol):
    """One of `load_parameters`."""

    @property
    def name(self) -> str:
        """Its name in an order."""
        ...

    @property
    def maximum(self) -> float | None:
        """Its maximum; None: it is not a number, or has none."""
        ...


class RunningProcess(Protocol):
    """One of `processes`."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    @property
    def start_ticks(self) -> int:
        """Its start time in clock ticks of the host."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of one load."""

    shares: tuple[Any, ...] | None = None
    hides_devices: bool = False
    parameters: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    model_path: Path | None = None
    host_limit_bytes: int | None = None


class Backend(Protocol):
    """The port under test."""

    @property
    def process_id(self) -> int | None:
        """Id of the engine's main process; None: there is none."""
        ...

    @property
    def containment(self) -> str:
        """How the engine's processes are kept together, such as "process group"; empty: they are not ours."""
        ...

    def load_progress(self) -> float | None:
        """Returns the loaded share, 0 to 1; None: it is not loading, or not reported."""
        ...

    def signs(self) -> Signs | None:
        """Returns the signs of work of the engine's processes; None: there are none, or they are not ours."""
        ...

    async def responds(self, timeout_seconds: float) -> bool:
        """Whether the engine answers a cheap request in time."""
        ...

    @property
    def load_parameters(self) -> Sequence[Parameter]:
        """The parameters that an order may have."""
        ...

    def processes(self) -> Sequence[RunningProcess]:
        """Returns every process of the engine."""
        ...

    async def start(self, order: Any = None) -> Facts:
        """Starts the engine and returns once it answers; an order has the shape of Order."""
        ...

    async def wait_exit(self) -> Exit:
        """Returns when the engine's process has ended by itself."""
        ...

    async def stop(self) -> None:
        """Stops the engine and everything it started. Idempotent."""
        ...

    def generate(self, payload: Payload, call: Any) -> AsyncGenerator[Frame]:
        """Runs one generation; closing the generator cancels it."""
        ...

    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: Any) -> Embedded:
        """Embeds every input."""
        ...

    def log_lines(self, count: int) -> list[str]:
        """Returns the last lines of the engine's output, oldest first, across restarts."""
        ...


def _nothing() -> None:
    """Does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """Use of the prefix cache by a request; by default the engine decides."""

    slot: int | None = None
    fresh: bool = False
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request as the runner describes it to its backend."""

    request_id: str = "req-conformance"
    traceparent: str = ""
    on_token: Callable[[], None] = _nothing
    on_prefill: Callable[[], None] = _nothing
    cache: CacheUse = field(default_factory=CacheUse)
    adapter: str = ""
    answer_by: float | None = None
    whole: bool = False
    joins_texts: bool = False
    ends_loops: bool = False


@runtime_checkable
class Tokenizes(Protocol):
    """A backend that tokenizes texts and conversations."""

    async def tokenize(self, payload: tokenize_pb2.TokenizePayload, call: Any) -> tokenize_pb2.TokenizeResult:
        """Returns the tokens of a text or of a conversation."""
        ...
