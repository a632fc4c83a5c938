"""Backend of the runtime server: any OpenAI-compatible server program as a supervised child process."""

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from typing_extensions import override

from runner_svc.backend.port import (
    BackendFacts,
    CacheIsolation,
    CallInfo,
    ErasedCache,
    LoadOrder,
)
from runner_svc.engine_http.faults import BadHeadError, BrokenAnswerError, UnansweredError, UnconnectedError
from runner_svc.memory.estimate import DeclaredForecast, manifest_bytes_of
from runner_svc.openai_upstream.client import CHAT, Endpoint, OpenAiHttp
from runner_svc.openai_upstream.server_probes import MODELS
from runner_svc.policy.model_names import listed_models, not_listed_message
from runner_svc.policy.parameters import EngineParameters
from runner_svc.policy.progress import EngineUsage
from runner_svc.runtimes.engine_figures import MetricsPage
from runner_svc.runtimes.kv_events import can_follow, sets_flag
from runner_svc.runtimes.metrics_page import MetricNames, load_of, samples_of
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine
from runner_svc.runtimes.placeholders import filled, placeholders_of
from runner_svc.runtimes.server.presets import Route, ServerPreset
from runner_svc.runtimes.server.runtime import ServerModel, check_template, command_of, find_program, preset_of
from runner_svc.runtimes.started_server import HEALTH_TIMEOUT_SECONDS, StartedServer, StartLog
from weft.api.common.v1 import tokenize_pb2
from weft.api.runner.v1 import runner_service_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.telemetry.structured_logs import new_traceparent
from weft.kernel.values.names import new_id

LIST_SECONDS = 5.0
FLUSH_SECONDS = 30.0
SLEEP_SECONDS = 120.0
"""Timeout of a sleep or a wake, which may copy the weights between devices and main memory."""
_OK = 200
_NOT_FOUND = 404
_REFUSED = frozenset({401, 403})


def metrics_page_of(preset: ServerPreset) -> MetricsPage | None:
    """Returns the metrics page of a program; None: unknown."""
    if not preset.metrics_path:
        return None
    return MetricsPage(preset.metrics_path, lambda page: load_of(samples_of(page), preset.metrics))


def operations_of(model: ServerModel) -> frozenset[Operation]:
    """Returns the operations that a model offers."""
    return frozenset(Operation[word.upper()] for word in model.operations) or preset_of(model).operations


def upstream_name(model: ServerModel) -> str:
    """Returns the program's name of a model in requests."""
    return model.upstream_model or preset_of(model).upstream_model or model.name


class ServerBackend(StartedServer[ServerModel]):
    """Backend of one server program process.

    The program gets its port and need not print it. Connections to it are checked unless `external_listener` is set.
    """

    needs_port = True
    cache_isolation = CacheIsolation.NONE
    listener_remedy = "; if the command starts it elsewhere, as docker run does, set external_listener: true"

    def __init__(self, model: ServerModel, context: ModelContext) -> None:
        self.preset = preset_of(model)
        self.engine_parameters = self.preset.parameters
        self.key_variable = model.key_variable or self.preset.key_variable
        ready = model.ready
        self.health_path = (ready and ready.path) or self.preset.health_path
        self.healthy_status = _OK if ready is None else ready.status
        self.metrics_page = metrics_page_of(self.preset)
        self.folder = None if model.working_folder is None else model.working_folder.expanduser()
        self.external_listener = model.external_listener
        self._command_line = command_of(model, context.command)
        # The command's CPU time says nothing about a load in another process, so only start_timeout_seconds limits it.
        stall_seconds = math.inf if model.external_listener else context.load_stall_seconds
        # The whole command line may contain placeholders, which each start fills with its port.
        has_own_command = bool(model.command or context.command)
        reports = self.preset.kv_events and not has_own_command if model.kv_events is None else model.kv_events
        self.reports_blocks = reports and can_follow() and not sets_flag(self._command_line)
        super().__init__(model, replace(context, command=(), load_stall_seconds=stall_seconds))
        salts = self.preset.cache_salt if model.cache_salt is None else model.cache_salt
        self.cache_isolation = CacheIsolation.SALT if salts else CacheIsolation.NONE
        self.operations, self.start_timeout_seconds = operations_of(model), model.start_timeout_seconds

    @override
    def signs(self) -> EngineUsage | None:
        """See Backend.signs. Also None if the work is done by a process that is not a descendant of the command."""
        return None if self.external_listener else super().signs()

    @override
    async def erase_cache(self, slots: Sequence[int] | None = None) -> ErasedCache:
        """See Backend.erase_cache; erases the whole cache, whatever the slots."""
        route, http = self.preset.flush, self._http
        if route is None or http is None:
            return await super().erase_cache(slots)
        status, _ = await self._ask(http, route, FLUSH_SECONDS)
        if status != _OK:
            raise WeftError(Reason.BACKEND_ERROR, f"the server did not erase its cache (status {status})")
        self.note_emptied_cache()
        return ErasedCache(entry_count=0)

    @override
    async def engine_claims(self) -> Sequence[runner_service_pb2.EngineClaim]:
        http = self._http
        seen: dict[str, str | None] = {}
        if http is not None and self.preset.sources:
            seen["health_path"] = await self._contradicts_health(http)
            if self.preset.lists_model:
                seen["lists_model"] = await self._contradicts_list(http)
            if self.preset.metrics_path:
                seen["metrics_path"] = seen["metrics"] = await self._contradicts_metrics(http)
            if self.key_variable:
                seen["key_variable"] = await self._contradicts_key(http)
            if Operation.TOKENIZE in self.operations:
                seen["operations"] = await self._contradicts_tokens()
        return claims_of(self.preset, seen)

    async def _contradicts_health(self, http: OpenAiHttp) -> str | None:
        """Returns what contradicts the claim, like the following methods; None: it holds."""
        status = await http.status_of(self.health_path, LIST_SECONDS)
        return None if status == self.healthy_status else f"{self.health_path} returned status {status}"

    async def _contradicts_list(self, http: OpenAiHttp) -> str | None:
        answer = await http.answer_of(MODELS, LIST_SECONDS)
        if answer is None or answer[0] != _OK:
            return f"{MODELS} returned status {None if answer is None else answer[0]}"
        name = upstream_name(self.model)
        return None if listed_models(answer[1]).has(name) else f"{MODELS} does not list {name}"

    async def _contradicts_metrics(self, http: OpenAiHttp) -> str | None:
        path = self.preset.metrics_path
        answer = await http.answer_of(path, LIST_SECONDS)
        if answer is None or answer[0] != _OK:
            return f"{path} returned status {None if answer is None else answer[0]}"
        missing = missing_metrics(self.preset, answer[1])
        return f"{path} lacks {', '.join(missing)}" if missing else None

    async def _contradicts_key(self, http: OpenAiHttp) -> str | None:
        """Any request without the key must be rejected."""
        stranger = OpenAiHttp(replace(http.endpoint, api_key=""), self.context.timeouts, self.explain_break)
        try:
            status, _ = await stranger.call_route("POST", CHAT, LIST_SECONDS)
        except WeftError as error:
            return error.log_message
        finally:
            await stranger.close()
        return None if status in _REFUSED else f"a request without the key returned status {status}"

    async def _contradicts_tokens(self) -> str | None:
        call = CallInfo(request_id=new_id("req"), traceparent=new_traceparent())
        try:
            result = await self.tokenize(tokenize_pb2.TokenizePayload(text="one two three"), call)
        except WeftError as error:
            return f"counting tokens: {error.log_message}"
        return None if result.count > 0 else "it counted no tokens in a text"

    @override
    async def prepare(self, order: LoadOrder) -> None:
        if await asyncio.to_thread(find_program, self._command_line, self.context.environment) is None:
            install = f"; to install {self.preset.title}: {self.preset.install}" if self.preset.install else ""
            raise WeftError(Reason.CONNECT_FAILED, f"there is no program {self._command_line[0]}{install}")

    @override
    def arguments(self, order: LoadOrder, port: int) -> list[str]:
        values = self._values(port)
        return [filled(word, values) for word in self._command_line]

    @override
    def environment(self, order: LoadOrder) -> Mapping[str, str]:
        values = self._values(self._port)
        own = {name: self.context.environment.get(name, value) for name, value in self.model.environment.items()}
        templates = {**self.preset.environment, **own}
        return {**super().environment(order), **{name: filled(text, values) for name, text in templates.items()}}

    @override
    def note_line(self, line: str, log: StartLog) -> None:
        ready = self.model.ready
        if ready is not None and ready.line is not None and re.search(ready.line, line):
            log.is_ready.set()

    @override
    async def until_ready(self, http: OpenAiHttp, log: StartLog) -> None:
        if self.model.ready is not None and self.model.ready.line is not None:
            await log.is_ready.wait()
            if not self.external_listener:
                await self._require_listener(http)
        else:
            await super().until_ready(http, log)

    async def _require_listener(self, http: OpenAiHttp) -> None:
        """Raises CONNECT_FAILED unless the server accepts connections, whatever it answers."""
        with suppress(UnansweredError, BadHeadError, BrokenAnswerError, TimeoutError):
            try:
                await http.get(self.health_path, HEALTH_TIMEOUT_SECONDS, max_bytes=0)
            except UnconnectedError as error:
                message = f"the server does not listen on its port {self._port}{self.listener_remedy}"
                raise WeftError(Reason.CONNECT_FAILED, message) from error

    @override
    def endpoint(self, base_url: str, api_key: str) -> Endpoint:
        return Endpoint(base_url=base_url, api_key=api_key, model=upstream_name(self.model), parameters=self.parameters)

    @override
    async def facts(self, http: OpenAiHttp, order: LoadOrder) -> BackendFacts:
        """Raises MODEL_NOT_FOUND if the program lists only other models."""
        if self.preset.lists_model:
            await self._require_listed(http)
        if self.preset.load is not None:
            await self._load_model(http, self.preset.load)
        return await super().facts(http, order)

    @override
    async def free_memory(self, http: OpenAiHttp, order: LoadOrder) -> bool:
        route = self.preset.sleep
        if not self.model.sleeps_in_place or route is None:
            return False
        await self._require_done(http, route)
        return True

    @override
    async def take_memory(self, http: OpenAiHttp) -> None:
        route = self.preset.wake or self.preset.load
        assert route is not None, "the settings are refused otherwise"
        await self._require_done(http, route)
        await StartedServer.until_ready(self, http, StartLog(self._order, self.note_line))

    async def _require_done(self, http: OpenAiHttp, route: Route) -> None:
        status, _ = await self._ask(http, route, SLEEP_SECONDS)
        if status != _OK:
            raise WeftError(Reason.BACKEND_ERROR, f"{route.path} returned status {status}")

    async def _require_listed(self, http: OpenAiHttp) -> None:
        """Raises MODEL_NOT_FOUND with the listed names if the list lacks the model; an empty list proves nothing."""
        answer = await http.answer_of(MODELS, LIST_SECONDS)
        if answer is None or answer[0] != _OK:
            return
        listed, name = listed_models(answer[1]), upstream_name(self.model)
        if not listed.has(name):
            raise WeftError(Reason.MODEL_NOT_FOUND, not_listed_message(name, listed))

    async def _load_model(self, http: OpenAiHttp, route: Route) -> None:
        status, _ = await self._ask(http, route, self.model.start_timeout_seconds)
        if status == _NOT_FOUND:
            raise WeftError(Reason.MODEL_NOT_FOUND, f"the server has no model {upstream_name(self.model)}")
        if status != _OK:
            raise WeftError(Reason.BACKEND_ERROR, f"the server did not load the model (status {status})")

    async def _ask(self, http: OpenAiHttp, route: Route, timeout_seconds: float) -> tuple[int, bytes]:
        body = filled(route.body, self._values(self._port)).encode()
        return await http.call_route(route.method, route.path, timeout_seconds, body)

    def _values(self, port: int) -> dict[str, str]:
        return {
            "port": str(port),
            "model": self.model.weights,
            "name": upstream_name(self.model),
            "context": str(self.model.slot_context_tokens),
            "slots": str(self.model.slots),
        }


def build(model: ServerModel, context: ModelContext) -> ModelEngine:
    """Returns the engine of a model; see Runtime.build."""
    _check(model, context)
    return ModelEngine(
        make_backend=lambda: ServerBackend(model, context),
        operations=operations_of(model),
        slots=model.slots,
        context_tokens=model.slot_context_tokens,
        forecast=DeclaredForecast(manifest_bytes_of(model.memory_mb)),
        remote=bool(model.remote),
        timeouts=context.timeouts,
    )


def _check(model: ServerModel, context: ModelContext) -> None:
    """Raises INVALID_ARGUMENT naming a setting that is missing or contradicts another."""
    preset, command = preset_of(model), command_of(model, context.command)
    if not command:
        raise context.refuse("command", "must be set, or preset to a program that weft knows")
    for setting, texts in (("command", command), ("environment", tuple(model.environment.values()))):
        try:
            for text in texts:
                check_template(text)
        except ValueError as error:
            raise context.refuse(setting, str(error)) from None
    used = placeholders_of((*command, *preset.environment.values(), *model.environment.values()))
    if "port" not in used:
        raise context.refuse("command", "must contain {port}, here or in environment: weft chooses the port")
    if "model" in used and not model.model:
        raise context.refuse("model", "must be set: the command line has {model}")
    known = preset.operations | preset.other_operations
    if not operations_of(model) <= known:
        names = ", ".join(sorted(operation.name.lower() for operation in known))
        raise context.refuse("operations", f"{preset.title} offers: {names}")
    if (model.key_variable or preset.key_variable) in model.environment:
        raise context.refuse("environment", "must not set the variable of the key, which weft sets at each start")
    _check_sleep(model, preset, context)
    folder = model.working_folder
    if folder is not None and not folder.expanduser().is_dir():
        raise context.refuse("working_folder", f"there is no folder {folder}")


def _check_sleep(model: ServerModel, preset: ServerPreset, context: ModelContext) -> None:
    if model.sleeps_in_place and (preset.sleep is None or (preset.wake or preset.load) is None):
        raise context.refuse("sleeps_in_place", f"needs a preset with routes to sleep and to wake, not {preset.title}")


MAX_SEEN_CHARS = 500


def claims_of(preset: ServerPreset, seen: Mapping[str, str | None]) -> list[pb.EngineClaim]:
    """Returns the claims of a preset. `seen`: what contradicts each fact, by name; None: it holds."""
    return [
        pb.EngineClaim(
            name=name,
            claim=_words(getattr(preset, name)),
            source=source,
            state=_state(seen, name),
            seen=(seen.get(name) or "")[:MAX_SEEN_CHARS],
        )
        for name, source in preset.sources.items()
    ]


def missing_metrics(preset: ServerPreset, page: bytes) -> list[str]:
    """Returns the names of metrics that a page in Prometheus' text format lacks."""
    lines = page.decode("utf-8", "replace").splitlines()
    found = {line.partition("{")[0].partition(" ")[0] for line in lines if not line.startswith("#")}
    # A metric without a value has only a TYPE line.
    found |= {line.split()[2] for line in lines if line.startswith("# TYPE ") and len(line.split()) > 2}
    return [name for name in preset.metrics.all if name not in found]


def _state(seen: Mapping[str, str | None], name: str) -> pb.ClaimState.ValueType:
    if name not in seen:
        return pb.CLAIM_STATE_UNSPECIFIED
    return pb.CLAIM_STATE_KEPT if seen[name] is None else pb.CLAIM_STATE_BROKEN


def _words(value: Any) -> str:
    match value:
        case bool():
            words = "yes" if value else "no"
        case EngineParameters():
            words = ", ".join(sorted(value.allowed))
        case MetricNames():
            words = ", ".join(value.all)
        case frozenset():
            words = ", ".join(sorted(operation.name.lower() for operation in value))
        case Mapping():
            words = ", ".join(value.values())
        case tuple():
            words = " ".join(value)
        case _:
            words = "" if value is None else str(value)
    return words or "none"
