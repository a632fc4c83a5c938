"""The backend of the runtime openai_http: a server that runs already, which weft probes but never starts or ends."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from typing_extensions import override

from runner_svc.backend.port import BackendFacts, CacheIsolation, CallInfo, EnginePage, LoadOrder
from runner_svc.engine_http.answer import Answer
from runner_svc.openai_upstream.address import base_url, require_known_place, server_root
from runner_svc.openai_upstream.client import HEALTH, MODELS, Open, OpenAiHttp
from runner_svc.openai_upstream.server_probes import LISTED, SHARED_AGE, ServerProbe, lacks_list
from runner_svc.policy.backoff import ServerBackoff
from runner_svc.policy.model_names import ListedModels, listed_models, not_listed_message
from runner_svc.runtimes.engine_figures import FigureSampler, MetricsPage
from runner_svc.runtimes.known_metrics import METRICS, read_any_load
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine, parameter_profile, served_operations
from runner_svc.runtimes.openai_http.facts import read_facts
from runner_svc.runtimes.openai_http.runtime import ATTACHED_SLOTS, MAX_ATTACHED_SLOTS, PARAMETERS, OpenAiHttpModel
from runner_svc.runtimes.runtime import ModelFault
from runner_svc.runtimes.unmanaged_server import UnmanagedServer, read_key
from weft.api.registry.v1 import runner_pb2
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.kernel.request import TEXT_OPERATIONS, Operation
from weft.wake.redaction import redacted

PROBE_TIMEOUT_SECONDS = 5.0
LOADING_PAUSE_SECONDS = 0.25
DOCTOR_TIMEOUT_SECONDS = 3.0
MAX_LIST_BYTES = 8 * 1024 * 1024
_START_IT = "start the server, or correct `url`"
log = get_logger("weft.runner")


class _Presence(Enum):
    READY = auto()
    LOADING = auto()
    ABSENT = auto()


def operations_of(model: OpenAiHttpModel, context: ModelContext) -> frozenset[Operation]:
    """Returns the operations that a server offers, by its settings. Raises as `served_operations`."""
    default = TEXT_OPERATIONS - {Operation.EMBEDDING} if model.embeddings is False else TEXT_OPERATIONS
    return served_operations(model, default, context)


class AttachedServer(UnmanagedServer[OpenAiHttpModel]):
    """A Backend over a server that weft did not start."""

    def __init__(self, model: OpenAiHttpModel, context: ModelContext) -> None:
        super().__init__(
            model,
            context,
            operations=operations_of(model, context),
            parameters=parameter_profile(model, PARAMETERS),
        )
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

    @property
    @override
    def base_url(self) -> str:
        return _base_url(self.model)

    @override
    async def responds(self, timeout_seconds: float) -> bool:
        http = self._http
        return http is not None and await http.status_of(MODELS, timeout_seconds) is not None

    @property
    @override
    def cache_isolation(self) -> CacheIsolation:
        return CacheIsolation.SALT if self.model.cache_salt else CacheIsolation.NONE

    @override
    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        self._backoff = ServerBackoff()
        self._chunks_seen = 0
        facts = await super().start(order)
        # Off the premises a server is sent the requests for its model and nothing else.
        return facts if self.model.remote else await self._with_facts_of_server(facts)

    async def _with_facts_of_server(self, facts: BackendFacts) -> BackendFacts:
        """Returns the facts with those that the server tells, and begins to sample the figures of its load.

        The settings may say that weft uses less of it: of two numbers of slots the smaller one holds, and a context
        that is set.
        """
        http = self._running()
        told = await read_facts(http, self.model.server_model)
        self.figures.begin(http, MetricsPage(METRICS, read_any_load, has_others=True))
        return replace(
            facts,
            context_tokens=facts.context_tokens or told.context_tokens,
            slots=self._slots_of(told.slots),
            abilities=told.abilities,
        )

    def _slots_of(self, told: int) -> int:
        """Returns the slots that the server reports; 0: those of the settings."""
        if self.model.slots:
            return told if told < self.model.slots else 0
        if told > MAX_ATTACHED_SLOTS:
            log.warning(
                "server works on more concurrent requests than it is sent",
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
        """Raises NO_SLOT_AVAILABLE during a pause that the server requested (Retry-After)."""
        del call
        self._require_not_busy()
        try:
            return await open_response()
        except WeftError as error:
            if error.reason is Reason.BACKEND_NOT_READY and error.retry_after_seconds is not None:
                self._backoff.note_busy(error.retry_after_seconds, asyncio.get_running_loop().time())
            raise

    @override
    async def _require_ready(self, http: OpenAiHttp) -> None:
        """Waits only while the server reports that it is loading.

        Raises CONNECT_FAILED when it does not answer or refuses the key, MODEL_NOT_FOUND when it lists only other
        models, LOAD_STALLED when it loads for too long.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.context.load_stall_seconds
        while (presence := await self._probe(http)) is not _Presence.READY:
            if presence is _Presence.ABSENT:
                raise WeftError(Reason.CONNECT_FAILED, "the server does not answer")
            if loop.time() >= deadline:
                limit = self.context.load_stall_seconds
                raise WeftError(Reason.LOAD_STALLED, f"the server was still loading after {limit:g} s")
            await asyncio.sleep(LOADING_PAUSE_SECONDS)

    @override
    async def _is_there(self, http: OpenAiHttp) -> bool:
        """Also without a probe where parts of answers arrived since the last one."""
        received, self._chunks_seen = self._chunks_seen != http.chunks_received, http.chunks_received
        return received or await self._answers(http, self.context.probe_interval_seconds * SHARED_AGE)

    async def _answers(self, http: OpenAiHttp, max_age_seconds: float = 0.0) -> bool:
        self._why_gone = ""
        try:
            return await self._probe(http, max_age_seconds) is _Presence.READY
        except WeftError as error:
            self._why_gone = error.message
            return False

    async def _probe(self, http: OpenAiHttp, max_age_seconds: float = 0.0) -> _Presence:
        """Whether the server takes requests for the model, by a probe that began at most so long ago.

        Raises CONNECT_FAILED when it answers and is unusable, MODEL_NOT_FOUND when it lists only other models.
        """
        found = await self.context.probes.latest(self.base_url, self._key, max_age_seconds, partial(_look, http))
        if found.listed is not None:
            self._require_listed(found.listed)
        match found.presence:
            case 200 | 429:  # a server that limits its callers is there
                return _Presence.READY
            case None:
                return _Presence.ABSENT
            case 503:
                return _Presence.LOADING
            case 401 | 403:
                raise WeftError(Reason.CONNECT_FAILED, f"the server refuses the key (status {found.presence})")
            case _:
                raise WeftError(
                    Reason.CONNECT_FAILED, f"the server answers the request for its models with status {found.presence}"
                )

    def _require_listed(self, listed: ListedModels) -> None:
        """Raise MODEL_NOT_FOUND where a list lacks the model; an empty list proves nothing."""
        name = self.model.server_model
        if not listed.has(name):
            message = redacted(not_listed_message(name, listed), self._secrets)
            raise WeftError(Reason.MODEL_NOT_FOUND, message)

    @override
    async def _explain_break(self, reason: Reason) -> WeftError | None:
        """Returns SERVER_DIED for a broken answer of a server that is gone; None: it is there."""
        http = self._http
        if reason is not Reason.BACKEND_PROTOCOL_ERROR or http is None or await self._answers(http):
            return None
        return WeftError(Reason.SERVER_DIED, "the server went away while it worked on the request")


async def _look(http: OpenAiHttp) -> ServerProbe:
    """Returns what the server answers to the request for its models; without a list of them its health check."""
    answer = await http.answer_of(MODELS, PROBE_TIMEOUT_SECONDS)
    if answer is None:
        return ServerProbe(why="it does not answer")
    status, body = answer
    if lacks_list(status):
        return ServerProbe(status=status, health=await http.status_of(HEALTH, PROBE_TIMEOUT_SECONDS))
    return ServerProbe(status=status, listed=listed_models(body) if status == LISTED else None)


def _base_url(model: OpenAiHttpModel) -> str:
    """Returns the URL of a server without the version of its interface, with which it may be configured."""
    return server_root(model.url)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Refuse redirects: an API key is sent to the configured server only."""


def find_fault(model: OpenAiHttpModel, environment: Mapping[str, str]) -> ModelFault | None:
    """Requests the server's model list, for `weft doctor` and `weft runner join`.

    Returns None where the model is listed, or where the server has no list.
    """
    base, name = _base_url(model), model.server_model
    try:
        key = read_key(model.api_key_env, environment)
    except WeftError as error:
        return ModelFault(message=error.message, remedy=f"export {model.api_key_env}=...")
    shown = _without_user(base)
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{base}/v1/models", headers=headers)  # noqa: S310 - http or https, by the section
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
    try:
        with opener.open(request, timeout=DOCTOR_TIMEOUT_SECONDS) as answer:
            body = answer.read(MAX_LIST_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            return _fault_of_status(error.code, shown)
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        return ModelFault(message=f"{shown} does not answer: {why}", remedy=_START_IT)
    listed = listed_models(body)
    if listed.has(name):
        return None
    return ModelFault(message=not_listed_message(name, listed), remedy="set upstream_model", is_there=True)


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _fault_of_status(status: int, base: str) -> ModelFault | None:
    if lacks_list(status) or status == 429:
        return None
    if status in {401, 403}:
        return ModelFault(message=f"{base} refuses the key (status {status})", remedy="set api_key_env")
    return ModelFault(message=f"{base} answers the request for its models with status {status}", remedy=_START_IT)


def build(model: OpenAiHttpModel, context: ModelContext) -> ModelEngine:
    """Returns the engine of a model; see Runtime.build."""
    operations = operations_of(model, context)
    url = base_url(model.url, f"{context.where}.url")
    require_known_place(url, remote=model.remote, field=f"{context.where}.remote")
    return ModelEngine(
        make_backend=lambda: AttachedServer(model, context),
        operations=operations,
        slots=model.slots or ATTACHED_SLOTS,
        context_tokens=model.context_tokens or 0,
        remote=bool(model.remote),
        timeouts=context.timeouts,
    )
