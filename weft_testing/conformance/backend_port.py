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
"""No backend keeps so much of an engine's output."""


class Engine(Enum):
    """The engine a test wants behind its backend."""

    NORMAL = "answers at once; two slots or more; an answer to any prompt has at least ANSWER_TOKENS tokens"
    SLOW = "one slot; an answer lasts 20 s or more, its first token comes within 2 s"
    NEVER_READY = "runs but never becomes ready; the backend gives up within `start_seconds`"
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
        """Requests it works on at once; 0: as configured."""
        ...


class Embedded(Protocol):
    """What `embed` returns."""

    @property
    def embeddings(self) -> list[embedding_pb2.Embedding]:
        """In input order."""
        ...

    @property
    def usage(self) -> usage_pb2.Usage:
        """What they cost."""
        ...


class Exit(Protocol):
    """What `wait_exit` returns."""

    @property
    def reason(self) -> Reason:
        """SERVER_DIED, OUT_OF_MEMORY, or CONNECT_FAILED for a server that is not ours."""
        ...

    @property
    def how(self) -> str:
        """In words."""
        ...


class Signs(Protocol):
    """What `signs` returns."""

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the whole tree."""
        ...

    @property
    def gpu_seconds(self) -> float | None:
        """GPU time of the tree; None: unknown."""
        ...


class Parameter(Protocol):
    """One of `load_parameters`."""

    @property
    def name(self) -> str:
        """How an order names it."""
        ...

    @property
    def maximum(self) -> float | None:
        """The most it may be; None: no number, or no limit."""
        ...


class RunningProcess(Protocol):
    """One of `processes`."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    @property
    def start_ticks(self) -> int:
        """When it began, in clock ticks of the host."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a runner asks of one load."""

    shares: tuple[Any, ...] | None = None
    hides_devices: bool = False
    parameters: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    model_path: Path | None = None


class Backend(Protocol):
    """The port under test."""

    @property
    def process_id(self) -> int | None:
        """See the port."""
        ...

    @property
    def containment(self) -> str:
        """See the port."""
        ...

    def load_progress(self) -> float | None:
        """See the port."""
        ...

    def signs(self) -> Signs | None:
        """See the port."""
        ...

    async def responds(self, timeout_seconds: float) -> bool:
        """See the port."""
        ...

    @property
    def load_parameters(self) -> Sequence[Parameter]:
        """See the port."""
        ...

    def processes(self) -> Sequence[RunningProcess]:
        """See the port."""
        ...

    async def start(self, order: Any = None) -> Facts:
        """See the port; an order has the shape of Order."""
        ...

    async def wait_exit(self) -> Exit:
        """See the port."""
        ...

    async def stop(self) -> None:
        """See the port."""
        ...

    def generate(self, payload: Payload, call: Any) -> AsyncGenerator[Frame]:
        """See the port."""
        ...

    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: Any) -> Embedded:
        """See the port."""
        ...

    def log_lines(self, count: int) -> list[str]:
        """See the port."""
        ...


def _nothing() -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """How a request uses the prefix cache; the default is as the engine likes."""

    slot: int | None = None
    fresh: bool = False
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a runner says about a request."""

    request_id: str = "req-conformance"
    traceparent: str = ""
    on_token: Callable[[], None] = _nothing
    on_prefill: Callable[[], None] = _nothing
    cache: CacheUse = field(default_factory=CacheUse)
    answer_by: float | None = None
    whole: bool = False


@runtime_checkable
class Tokenizes(Protocol):
    """A backend that counts tokens as it would read them."""

    async def tokenize(self, payload: tokenize_pb2.TokenizePayload, call: Any) -> tokenize_pb2.TokenizeResult:
        """The tokens of a text or of a conversation."""
        ...
