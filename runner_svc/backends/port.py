"""The backend port: what a runner asks of an engine.

`weft.testing.conformance.backend` is the suite every implementation passes. Payloads and events are the generated
messages: a backend is an adapter, and translating twice would only cost time.
"""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from runner_svc.supervise.logs import LogRing
from weft.api.common.v1 import embedding_pb2, usage_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """What is known about the model once it is loaded."""

    operations: frozenset[Operation]
    context_tokens: int
    """Context of one slot, prompt and answer together; 0: unknown."""


def _nothing() -> None:
    """Nobody wants to know."""


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
    """In words: "exit code 1", "signal SIGKILL", and what may help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInfo:
    """What a backend may pass on about the request it works on."""

    request_id: str
    traceparent: str
    on_token: Callable[[], None] = _nothing
    """To be called for every token the engine sends, whether it can be shown yet or not: once per read is enough."""
    on_prefill: Callable[[], None] = _nothing
    """To be called for every report of the engine that it works on the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingResult:
    """Vectors in input order and what they cost."""

    embeddings: list[embedding_pb2.Embedding]
    usage: usage_pb2.Usage


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

    async def start(self) -> BackendFacts:
        """Start the engine and return once it answers requests.

        Raises LOAD_STALLED when it is not ready in time, SERVER_DIED when it exits first (the message has its last
        log lines), OUT_OF_MEMORY when that was for want of memory, CONNECT_FAILED when it cannot be started at all.
        Leaves no process behind when it raises or is cancelled.
        """
        ...

    def load_progress(self) -> float | None:
        """Share of the loading that is done, 0 to 1; None when it is not loading or nobody can tell."""
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
        its prompt, afterwards whatever has arrived; parameters that the engine does not take come as warnings, before
        any content. The last event of the last frame is `finished`, its receipt holding usage, gpu_time and
        tokens_per_second as the engine reported them; every choice has had its finish reason by then. Raises
        SERVER_DIED, OUT_OF_MEMORY, CONNECT_FAILED, HEADERS_TIMEOUT, BACKEND_REJECTED, CONTEXT_LENGTH_EXCEEDED,
        INVALID_ARGUMENT, BACKEND_ERROR or BACKEND_PROTOCOL_ERROR. How long it may be silent is not its business: the
        runner's watchdog looks, told by `call`. Closing the generator stops the engine's work on it.
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
