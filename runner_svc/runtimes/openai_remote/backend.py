"""The backend of the runtime openai_remote: a model of a provider off the premises, over OpenAI's Chat Completions.

Admission has decided that a request may leave: see `runner_svc.servicers.inference.RequestAdmission.admit`.
"""

import asyncio
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import aiohttp

from runner_svc.backend.port import BackendFacts, CallInfo, ExitReport, LoadOrder
from runner_svc.openai_upstream.client import MODELS, Endpoint, Open, OpenAiHttp
from runner_svc.openai_upstream.errors import BUSY
from runner_svc.openai_upstream.unmanaged_server import UnmanagedServer, read_key, secret_words
from runner_svc.policy.backoff import ServerBackoff
from runner_svc.policy.parameters import ParameterProfile
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.runtimes.openai_remote.parameters import PARAMETERS
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

PROBE_TIMEOUT_SECONDS = 10.0
DEFAULT_TIMEOUT_SECONDS = 120.0
_HAS_NO_LIST = frozenset({404, 405, 501})


class HealthCheck(StrEnum):
    """How the presence of a provider is checked."""

    CONFIG_ONLY = "config_only"
    """Not at all: a valid configuration counts as present, and the provider is called for requests only."""
    MODELS = "models"
    """By its list of models, requested with the key and without content of requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiRemoteConfig:
    """One model of one provider."""

    base_url: str = field(repr=False)
    """With the version of the interface, such as "https://api.example.com/v1"; `/chat/completions` is appended."""
    upstream_model: str
    """The provider's own name of the model."""
    api_key_env: str | None = None
    """Environment variable that holds the key, read with every start; None: no key is sent."""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    operations: frozenset[Operation] = frozenset({Operation.CHAT})
    context_tokens: int = 0
    """0: unknown."""
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    """Maximum wait until an answer begins, with retries and their pauses."""
    max_retries: int = 0
    """Maximum number of retries of a request for which the provider was busy, or that did not reach it."""
    health_check: HealthCheck = HealthCheck.CONFIG_ONLY
    probe_interval_seconds: float = 60.0
    """Interval of the requests for the list of models."""
    probe_failures: int = 3
    """Number of failures in a row after which the provider counts as gone."""
    timeouts: TimeoutProfile = field(default_factory=TimeoutProfile)
    parameters: ParameterProfile = field(default_factory=lambda: ParameterProfile(engine=PARAMETERS))


class OpenAiRemote(UnmanagedServer):
    """A Backend over a provider, which isolates its customers: all tenants of the mesh are one customer."""

    def __init__(self, config: OpenAiRemoteConfig) -> None:
        super().__init__(config.operations)
        self._config = config
        self._backoff = ServerBackoff(max_retries=config.max_retries)

    async def responds(self, timeout_seconds: float) -> bool:
        """Whether the provider answers; without health checks, whether the backend has started."""
        http = self._http
        if http is None or self._config.health_check is HealthCheck.CONFIG_ONLY:
            return http is not None
        return await http.status_of(MODELS, timeout_seconds) is not None

    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        """Prepare the client; the provider is called now only where its list of models is the health check.

        Raises INVALID_ARGUMENT naming an environment variable without the key, or for an order with options;
        CONNECT_FAILED when the list cannot be read.
        """
        self._require_no_orders(order)
        await self.stop()
        config = self._config
        key = read_key(config.api_key_env, config.environment)
        base_url = config.base_url.rstrip("/")
        self._secrets = secret_words(base_url, key)
        endpoint = Endpoint(
            base_url=base_url,
            api_key=key,
            model=config.upstream_model,
            parameters=config.parameters,
            is_provider=True,
        )
        http = OpenAiHttp(endpoint, config.timeouts, _no_explanation, self._open_with_retries)
        try:
            if config.health_check is HealthCheck.MODELS:
                _require_presence(await http.status_of(MODELS, PROBE_TIMEOUT_SECONDS))
        except BaseException:
            await http.close()
            raise
        self._http = http
        return BackendFacts(operations=config.operations, context_tokens=config.context_tokens)

    async def wait_exit(self) -> ExitReport:
        """Returns when the list of models failed several times in a row; never where it is not requested."""
        http, config = self._running(), self._config
        failures = 0
        while failures < config.probe_failures:
            if config.health_check is HealthCheck.CONFIG_ONLY:
                await asyncio.Event().wait()
            await asyncio.sleep(config.probe_interval_seconds)
            if http is not self._http:
                await asyncio.Event().wait()  # stopped by us: the waiting task is cancelled
            status = await http.status_of(MODELS, PROBE_TIMEOUT_SECONDS)
            failures = 0 if _is_there(status) else failures + 1
        return ExitReport(reason=Reason.CONNECT_FAILED, how="the provider stopped answering")

    async def _open_with_retries(self, open_response: Open, call: CallInfo) -> aiohttp.ClientResponse:
        """Returns a response whose answer begins in time, after as many retries as the configuration allows."""
        loop = asyncio.get_running_loop()
        limit = self._config.timeout_seconds
        give_up_at = loop.time() + limit
        if call.answer_by is not None:
            give_up_at = min(give_up_at, call.answer_by)
        try:
            async with asyncio.timeout(limit):
                return await self._retry(open_response, give_up_at)
        except TimeoutError as error:
            message = f"the provider's answer did not begin in time (timeout_seconds, {limit:g} s)"
            raise WeftError(Reason.HEADERS_TIMEOUT, message) from error

    async def _retry(self, open_response: Open, give_up_at: float) -> aiohttp.ClientResponse:
        loop = asyncio.get_running_loop()
        self._require_not_busy()
        for retries in itertools.count():
            try:
                return await open_response()
            except WeftError as error:
                if error.reason is Reason.BACKEND_NOT_READY:
                    self._backoff.note_busy(error.retry_after_seconds, loop.time())
                await self._pause_or_raise(error, retries, give_up_at)
        raise AssertionError("the count has no end")

    async def _pause_or_raise(self, error: WeftError, retries: int, give_up_at: float) -> None:
        loop = asyncio.get_running_loop()
        pause = self._backoff.pause_before_retry(error.reason, retries, loop.time(), give_up_at)
        while pause:
            await asyncio.sleep(pause)
            # Another request may have been refused meanwhile with a longer pause.
            pause = self._backoff.seconds_to_wait(loop.time())
            if loop.time() + pause >= give_up_at:
                pause = None
        if pause is None:
            raise error


async def _no_explanation(reason: Reason) -> WeftError | None:
    """An ExplainBreak: nothing more is known about a provider."""
    del reason
    return None


def _is_there(status: int | None) -> bool:
    return status is not None and (status == 200 or status in _HAS_NO_LIST or status in BUSY)


def _require_presence(status: int | None) -> None:
    if status is None:
        raise WeftError(Reason.CONNECT_FAILED, "the provider does not answer")
    if status in (401, 403):
        raise WeftError(Reason.CONNECT_FAILED, f"the provider refuses the key (status {status})")
    if not _is_there(status):
        raise WeftError(Reason.CONNECT_FAILED, f"the provider answers the request for its models with status {status}")
