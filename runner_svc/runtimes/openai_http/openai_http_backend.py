"""Backend of the runtime openai_http: an external server, which weft probes but does not start or stop."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from urllib.parse import urlsplit, urlunsplit

from typing_extensions import override

from runner_svc.backend.port import BackendFacts, CacheIsolation, CallInfo, EnginePage, LoadOrder
from runner_svc.engine_http.answer import Answer
from runner_svc.engine_http.faults import HttpFaultError, UnansweredError, Unconnected, UnconnectedError
from runner_svc.openai_upstream.address import base_url, require_known_location, server_root
from runner_svc.openai_upstream.answers import head_fault, unreached
from runner_svc.openai_upstream.client import Endpoint, Open, OpenAiHttp
from runner_svc.openai_upstream.server_probes import HEALTH, LISTED, MODELS, SHARED_AGE, ServerProbe, lacks_list
from runner_svc.policy.backoff import ServerBackoff
from runner_svc.policy.model_names import ListedModels, listed_models, not_listed_message
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.runtimes.engine_figures import FigureSampler, MetricsPage
from runner_svc.runtimes.metrics_page import METRICS, read_any_load
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine, parameter_profile, served_operations
from runner_svc.runtimes.openai_http.facts import read_facts
from runner_svc.runtimes.openai_http.runtime import ATTACHED_SLOTS, MAX_ATTACHED_SLOTS, PARAMETERS, OpenAiHttpModel
from runner_svc.runtimes.runtime import ModelFault
from runner_svc.runtimes.unmanaged_server import UnmanagedServer, read_key
from weft.api.registry.v1 import runner_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import TEXT_OPERATIONS, Operation
from weft.kernel.telemetry.log import get_logger
from weft.wake.recipes import redacted

PROBE_TIMEOUT_SECONDS = 5.0
LOADING_PAUSE_SECONDS = 0.25
DOCTOR_TIMEOUT_SECONDS = 3.0
_START_IT = "start the server, or correct `url`"
log = get_logger("weft.runner")


def operations_of(model: OpenAiHttpModel, context: ModelContext) -> frozenset[Operation]:
    """Returns the operations that a server offers according to its settings. Raises as `served_operations`."""
    default = TEXT_OPERATIONS - {Operation.EMBEDDING} if model.embeddings is False else TEXT_OPERATIONS
    return served_operations(model, default, context)


class AttachedServer(UnmanagedServer[OpenAiHttpModel]):
    """Backend of an external server."""

    cache_isolation = CacheIsolation.NONE

    def __init__(self, model: OpenAiHttpModel, context: ModelContext) -> None:
        super().__init__(
            model,
            context,
            operations=operations_of(model, context),
            parameters=parameter_profile(model, PARAMETERS),
        )
        self.base_url = server_root(model.url)
        self.cache_isolation = CacheIsolation.SALT if model.cache_salt else CacheIsolation.NONE
        self._chunks_seen = 0
        self.figures = FigureSampler()

    @property
    @override
    def engine_load(self) -> runner_pb2.EngineLoad | None:
        return self.figures.load

    @property
    @override
    def engine_page(self) -> EnginePage:
        return self.figures.page

    @override
    async def responds(self, timeout_seconds: float) -> bool:
        http = self._http
        return http is not None and await http.status_of(MODELS, timeout_seconds) is not None

    @override
    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        self._backoff = ServerBackoff()
        self._chunks_seen = 0
        facts = await super().start(order)
        # A remote server only receives requests for its model.
        return facts if self.model.remote else await self._with_facts_of_server(facts)

    async def _with_facts_of_server(self, facts: BackendFacts) -> BackendFacts:
        """Adds the facts that the server reports, and starts sampling its load figures.

        Settings may restrict weft's use of the server: the smaller number of slots and a configured context apply.
        """
        http = self._running()
        told = await read_facts(http, self.model.server_model)
        self.figures.begin(http, MetricsPage(METRICS, read_any_load, has_others=True))
        return replace(
            facts,
            context_tokens=facts.context_tokens or told.context_tokens,
            slots=self._slots_of(told.slots),
            capabilities=told.capabilities,
        )

    def _slots_of(self, told: int) -> int:
        """Returns the server's slots if they limit those of the settings; 0: use the settings."""
        if self.model.slots:
            return told if told < self.model.slots else 0
        if told > MAX_ATTACHED_SLOTS:
            log.warning(
                "server processes more concurrent requests than configured",
                model=self.model.name,
                server_slots=told,
                max_slots=MAX_ATTACHED_SLOTS,
            )
        return min(told, MAX_ATTACHED_SLOTS)

    @override
    async def stop(self) -> None:
        await self.figures.end()
        await super().stop()

    @override
    async def _open(self, open_response: Open, call: CallInfo) -> Answer:
        """Raises RATE_LIMIT_EXCEEDED or NO_SLOT_AVAILABLE during a pause that the server requested."""
        del call
        return await self._open_unless_busy(open_response)

    @override
    async def _require_ready(self, http: OpenAiHttp) -> None:
        """Waits only while the server reports that it is loading.

        Raises CONNECT_FAILED if it does not respond or rejects the key, MODEL_NOT_FOUND if it lists only other models,
        LOAD_STALLED if it loads for too long.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.context.load_stall_seconds
        while not (is_ready := await self._is_ready(http)):
            if is_ready is False:
                raise WeftError(Reason.CONNECT_FAILED, "the server does not answer")
            if loop.time() >= deadline:
                limit = self.context.load_stall_seconds
                raise WeftError(Reason.LOAD_STALLED, f"the server was still loading after {limit:g} s")
            await asyncio.sleep(LOADING_PAUSE_SECONDS)

    @override
    async def _is_there(self, http: OpenAiHttp) -> bool:
        """Needs no probe if parts of answers have arrived since the last check."""
        received, self._chunks_seen = self._chunks_seen != http.chunks_received, http.chunks_received
        return received or await self._answers(http, self.context.probe_interval_seconds * SHARED_AGE)

    async def _answers(self, http: OpenAiHttp, max_age_seconds: float = 0.0) -> bool:
        self._why_gone = ""
        try:
            return bool(await self._is_ready(http, max_age_seconds))
        except WeftError as error:
            self._why_gone = error.log_message
            return False

    async def _is_ready(self, http: OpenAiHttp, max_age_seconds: float = 0.0) -> bool | None:
        """Whether the server accepts requests for the model, by a probe of at most this age; None: it is loading.

        Raises CONNECT_FAILED if it responds but is unusable, MODEL_NOT_FOUND if it lists only other models.
        """
        found = await self.context.probes.latest(self.base_url, self._key, max_age_seconds, partial(_look, http))
        if found.listed is not None:
            self._require_listed(found.listed)
        match found.presence:
            case 200 | 429:  # 429: running, but rate-limited
                return True
            case None:
                return False
            case 503:
                return None
            case 401 | 403:
                raise WeftError(Reason.CONNECT_FAILED, f"the server refuses the key (status {found.presence})")
            case _:
                raise WeftError(
                    Reason.CONNECT_FAILED, f"the server answers the request for its models with status {found.presence}"
                )

    def _require_listed(self, listed: ListedModels) -> None:
        """Raises MODEL_NOT_FOUND if the list lacks the model; an empty list proves nothing."""
        name = self.model.server_model
        if not listed.has(name):
            message = redacted(not_listed_message(name, listed), self._secrets)
            raise WeftError(Reason.MODEL_NOT_FOUND, message)

    @override
    async def _explain_break(self, reason: Reason) -> WeftError | None:
        """Returns SERVER_DIED if the server is gone after a broken answer; None: it is still there."""
        http = self._http
        if reason is not Reason.BACKEND_PROTOCOL_ERROR or http is None or await self._answers(http):
            return None
        return WeftError(Reason.SERVER_DIED, "the server disconnected while it processed the request")


async def _look(http: OpenAiHttp) -> ServerProbe:
    """Requests the server's model list, or its health check if it has no list."""
    answer = await http.answer_of(MODELS, PROBE_TIMEOUT_SECONDS)
    if answer is None:
        return ServerProbe(why="it does not answer")
    status, body = answer
    if lacks_list(status):
        return ServerProbe(status=status, health=await http.status_of(HEALTH, PROBE_TIMEOUT_SECONDS))
    return ServerProbe(status=status, listed=listed_models(body) if status == LISTED else None)


def find_fault(model: OpenAiHttpModel, environment: Mapping[str, str]) -> ModelFault | None:
    """Requests the server's model list, for `weft doctor` and `weft runner join`.

    Returns None if the model is listed, or if the server has no list.
    """
    name, parts = model.server_model, urlsplit(server_root(model.url))
    try:
        key = read_key(model.api_key_env, environment)
    except WeftError as error:
        return ModelFault(message=error.message, remedy=f"export {model.api_key_env}=...")
    shown = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    try:
        status, body = asyncio.run(_ask_for_models(model, key))
    except (HttpFaultError, TimeoutError, ValueError) as error:
        return ModelFault(message=f"{shown} does not answer: {_why_unanswered(error)}", remedy=_START_IT)
    if status == LISTED and not (listed := listed_models(body)).has(name):
        return ModelFault(message=not_listed_message(name, listed), remedy="set upstream_model", is_reachable=True)
    if status in (LISTED, 429) or lacks_list(status):
        return None
    if status in (401, 403):
        return ModelFault(message=f"{shown} refuses the key (status {status})", remedy="set api_key_env")
    return ModelFault(message=f"{shown} answers the request for its models with status {status}", remedy=_START_IT)


async def _ask_for_models(model: OpenAiHttpModel, key: str) -> tuple[int, bytes]:
    """Returns status and body of the model list. Raises as `OpenAiHttp.get`, and ValueError for an invalid URL."""
    endpoint = Endpoint(base_url=server_root(model.url), api_key=key, parameters=parameter_profile(model, PARAMETERS))

    async def explain(_: Reason) -> None:
        return None

    http = OpenAiHttp(endpoint, TimeoutProfile(connect_seconds=DOCTOR_TIMEOUT_SECONDS), explain)
    try:
        return await http.get(MODELS, DOCTOR_TIMEOUT_SECONDS)
    finally:
        await http.close()


def _why_unanswered(error: Exception) -> str:
    match error:
        case TimeoutError() | UnconnectedError(why=Unconnected.TIMEOUT):
            return f"it sent nothing within {DOCTOR_TIMEOUT_SECONDS:g} s"
        case UnconnectedError():
            return error.words or unreached(error)
        case UnansweredError():
            return "it closed the connection"
        case HttpFaultError():
            return head_fault(error)
        case _:
            return f"its URL is invalid: {error}"


def build(model: OpenAiHttpModel, context: ModelContext) -> ModelEngine:
    """Returns the engine of a model; see Runtime.build."""
    operations = operations_of(model, context)
    url = base_url(model.url, f"{context.where}.url")
    require_known_location(url, remote=model.remote, field=f"{context.where}.remote")
    return ModelEngine(
        make_backend=lambda: AttachedServer(model, context),
        operations=operations,
        slots=model.slots or ATTACHED_SLOTS,
        context_tokens=model.context_tokens or 0,
        remote=bool(model.remote),
        timeouts=context.timeouts,
    )
