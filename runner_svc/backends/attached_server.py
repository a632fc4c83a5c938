"""An OpenAI-compatible server that runs already: looked for, used, let go of, never started and never ended.

Where it is and what key it wants stays in this process: no error of this module names them, not even in words that the
server itself wrote.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum, auto

from yarl import URL

from runner_svc.backends.openai_http import HEALTH, MODELS, Endpoint, OpenAiHttp
from runner_svc.backends.port import (
    BackendFacts,
    CacheIsolation,
    CallInfo,
    EmbeddingResult,
    ErasedCache,
    ExitReport,
    LoadOrder,
    ProcessSigns,
)
from runner_svc.policy.load_parameters import LoadParameter, check_parameters
from runner_svc.policy.parameters import EngineKind, ParameterProfile
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.supervise.logs import LogRing
from weft.api.common.v1 import embedding_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.gpu.sighting import ProcessId
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft.wake.redaction import redacted

PROBE_TIMEOUT_SECONDS = 5.0
LOADING_PAUSE_SECONDS = 0.25
_VERSION_PATH = "/v1"
_UNKNOWN_PATH = frozenset({404, 405, 501})


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedServerConfig:
    """One model of one server."""

    url: str = field(repr=False)
    """http or https; with /v1 at its end or without."""
    upstream_model: str
    """The server's own name of the model."""
    api_key_env: str | None = None
    """Environment variable that holds the key, read with every start; None: the server wants none."""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    operations: frozenset[Operation] = frozenset(Operation)
    context_tokens: int = 0
    cache_salt: bool = False
    """Whether it knows `cache_salt`, as vLLM does: requests with different ones share no cached prefixes."""
    probe_interval_seconds: float = 5.0
    """How often the server is asked whether it is there."""
    probe_failures: int = 3
    """Probes in a row that must fail before it counts as gone."""
    load_stall_seconds: float = 300.0
    """How long a server may answer that it is loading."""
    timeouts: TimeoutProfile = field(default_factory=TimeoutProfile)
    parameters: ParameterProfile = field(default_factory=lambda: ParameterProfile(kind=EngineKind.OPENAI_HTTP))
    """Which parameters beyond weft's own it is sent, and whether the model thinks by default."""

    @property
    def base_url(self) -> str:
        """The URL without a slash and without /v1 at its end."""
        return self.url.rstrip("/").removesuffix(_VERSION_PATH).rstrip("/")

    def secrets(self, api_key: str) -> tuple[str, ...]:
        """The words that nobody else may hear."""
        url = URL(self.url)
        host, port = url.host or "", str(url.explicit_port or "")
        return (self.base_url, f"{host}:{port}", host, port, api_key)


class _Presence(Enum):
    READY = auto()
    LOADING = auto()
    ABSENT = auto()


class AttachedServer:
    """A Backend over a server of somebody else's."""

    def __init__(self, config: AttachedServerConfig) -> None:
        self._config = config
        self._http: OpenAiHttp | None = None
        self._secrets: tuple[str, ...] = ()
        self._log = LogRing()

    @property
    def process_id(self) -> int | None:
        """None: the process is not ours."""
        return None

    @property
    def containment(self) -> str:
        """Empty: the process is not ours."""
        return ""

    def load_progress(self) -> float | None:
        """None: servers do not tell."""
        return None

    def signs(self) -> ProcessSigns | None:
        """None: the process is not ours, and may be on another machine."""
        return None

    async def responds(self, timeout_seconds: float) -> bool:
        """See Backend.responds."""
        http = self._http
        return http is not None and await http.status_of(MODELS, timeout_seconds) is not None

    @property
    def log(self) -> LogRing:
        """Empty: the output is not ours."""
        return self._log

    def log_lines(self, count: int) -> list[str]:
        """None: the output is not ours."""
        return self._log.last(count)

    @property
    def load_parameters(self) -> Sequence[LoadParameter]:
        """None: the server loads as it likes."""
        return ()

    @property
    def cache_isolation(self) -> CacheIsolation:
        """See Backend.cache_isolation."""
        return CacheIsolation.SALT if self._config.cache_salt else CacheIsolation.NONE

    def processes(self) -> tuple[ProcessId, ...]:
        """None: they are not ours."""
        return ()

    async def erase_cache(self, slots: Sequence[int] | None = None) -> ErasedCache:
        """Refused: OpenAI's interface has no word for it."""
        del slots
        raise WeftError(Reason.UNSUPPORTED_OPERATION, "this server cannot be told to forget what it has cached")

    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        """Attach to the server if it answers; it is waited for only while it says that it is loading.

        Raises CONNECT_FAILED when it does not answer or refuses the key, LOAD_STALLED when it loads for too long,
        INVALID_ARGUMENT naming an environment variable that should hold the key and does not, or for an order that
        sets something: it is not ours to load.
        """
        order = order or LoadOrder()
        check_parameters(order.parameters, self.load_parameters)
        if order.model_path is not None:
            raise invalid_field("quantization", "cannot be chosen: weft did not start this server")
        await self.stop()
        key = self._read_key()
        self._secrets = self._config.secrets(key)
        endpoint = Endpoint(
            base_url=self._config.base_url,
            api_key=key,
            model=self._config.upstream_model,
            parameters=self._config.parameters,
        )
        http = OpenAiHttp(endpoint, self._config.timeouts, self._explain_break)
        try:
            await self._until_ready(http)
        except BaseException:
            await http.close()
            raise
        self._http = http
        return BackendFacts(operations=self._config.operations, context_tokens=self._config.context_tokens)

    async def wait_exit(self) -> ExitReport:
        """Return when the server has not answered several probes in a row while no answer of its arrived either."""
        http, config = self._running(), self._config
        failures, chunks = 0, 0
        while failures < config.probe_failures:
            await asyncio.sleep(config.probe_interval_seconds)
            if http is not self._http:
                await asyncio.Event().wait()  # a stop is not news; whoever waits here is cancelled
            received, chunks = chunks != http.chunks_received, http.chunks_received
            answers = received or await self._is_there(http)
            failures = 0 if answers else failures + 1
        return ExitReport(reason=Reason.CONNECT_FAILED, how="the server stopped answering")

    async def stop(self) -> None:
        """Close our connections; the server goes on. Idempotent."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        """See Backend.generate."""
        try:
            async with aclosing(self._running().generate(payload, call)) as frames:
                async for frame in frames:
                    yield frame
        except WeftError as error:
            raise self._discreet(error) from None

    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: CallInfo) -> EmbeddingResult:
        """See Backend.embed."""
        if Operation.EMBEDDING not in self._config.operations:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, "this model is not configured for embeddings")
        try:
            return await self._running().embed(payload, call)
        except WeftError as error:
            raise self._discreet(error) from None

    def _running(self) -> OpenAiHttp:
        if self._http is None:
            raise WeftError(Reason.BACKEND_NOT_READY, "the backend is not running")
        return self._http

    def _read_key(self) -> str:
        name = self._config.api_key_env
        if name is None:
            return ""
        key = self._config.environment.get(name, "").strip()
        if not key:
            raise WeftError(Reason.INVALID_ARGUMENT, f"the environment variable {name} is to hold the key and is empty")
        if not (key.isascii() and key.isprintable()):
            raise WeftError(Reason.INVALID_ARGUMENT, f"the key in the environment variable {name} is no printable text")
        return key

    async def _until_ready(self, http: OpenAiHttp) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.load_stall_seconds
        while (presence := await self._probe(http)) is not _Presence.READY:
            if presence is _Presence.ABSENT:
                raise WeftError(Reason.CONNECT_FAILED, "the server does not answer")
            if loop.time() >= deadline:
                limit = self._config.load_stall_seconds
                raise WeftError(Reason.LOAD_STALLED, f"the server was still loading after {limit:g} s")
            await asyncio.sleep(LOADING_PAUSE_SECONDS)

    async def _is_there(self, http: OpenAiHttp) -> bool:
        try:
            return await self._probe(http) is _Presence.READY
        except WeftError:
            return False

    async def _probe(self, http: OpenAiHttp) -> _Presence:
        """Whether the server takes requests. Raises CONNECT_FAILED when it answers and is of no use."""
        status = await http.status_of(MODELS, PROBE_TIMEOUT_SECONDS)
        if status in _UNKNOWN_PATH:
            # Some servers have no list of models; what they say about their health must do.
            status = await http.status_of(HEALTH, PROBE_TIMEOUT_SECONDS)
        match status:
            case 200 | 429:  # a server that counts its callers' questions is there
                return _Presence.READY
            case None:
                return _Presence.ABSENT
            case 503:
                return _Presence.LOADING
            case 401 | 403:
                raise WeftError(Reason.CONNECT_FAILED, f"the server refuses the key (status {status})")
            case _:
                raise WeftError(Reason.CONNECT_FAILED, f"the server answers a look at its models with status {status}")

    async def _explain_break(self, reason: Reason) -> WeftError | None:
        """A connection that broke in mid-answer: because the server went away?"""
        http = self._http
        if reason is not Reason.BACKEND_PROTOCOL_ERROR or http is None or await self._is_there(http):
            return None
        return WeftError(Reason.SERVER_DIED, "the server went away while it worked on the request")

    def _discreet(self, error: WeftError) -> WeftError:
        if isinstance(error, FieldError):
            return error  # our own words about the caller's request
        return WeftError(
            error.reason,
            redacted(error.message, self._secrets),
            metadata=error.metadata,
            retry_after_seconds=error.retry_after_seconds,
        )
