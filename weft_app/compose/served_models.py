"""Builds a configured runner's served models: engine by runtime, sleep, wake and chat settings."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from typing_extensions import override

from runner_svc.backend.port import Backend, BackendFacts, CallInfo, ExitReport, LoadOrder
from runner_svc.chat.chat_settings import ChatSettings
from runner_svc.instance.instance_settings import (
    HibernationSettings,
    NoteFetch,
    ServedAdapter,
    ServedModel,
    SleepSettings,
)
from runner_svc.policy.keep_alive import category_of
from runner_svc.policy.signals import SignalSettings, reason_only, signal_catalogue
from runner_svc.runner_settings import RunnerSettings
from runner_svc.runtimes import runtime_settings as settings
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine, engine_environment
from runner_svc.runtimes.runtime_settings import (
    AdapterSettings,
    FileModelSettings,
    ModelSettings,
    SleepingModelSettings,
    StartedModelSettings,
    WakeSettings,
)
from runner_svc.runtimes.table import why_off
from runner_svc.supervise.logs import LogRing
from runner_svc.tools.schemas import object_schema
from weft.api.common.v1 import sampling_pb2
from weft.api.registry.v1 import wake_pb2
from weft.dispatch.declared_presets import sampling_of
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.capabilities import ThinkingMode, complete_list
from weft.kernel.requests.request_values import Operation, Skill, journal_mode_of
from weft.kernel.schemas.field_rules import check_message
from weft.kernel.settings.setting_annotations import values_of
from weft.kernel.values.units import keep_alive_seconds
from weft.wake.recipes import DEFAULT_MAX_WAIT_SECONDS, MAX_WAIT_SECONDS
from weft_app.compose.published_agents import tags_of


def runner_context(section: RunnerSettings) -> ModelContext:
    """Returns the context that a runner's models share."""
    return ModelContext(
        where=f"runners.{section.name}",
        command=section.command,
        timeouts=section.timeouts,
        graces=section.graces,
        load_stall_seconds=section.load_stall_seconds,
        probe_interval_seconds=section.probe_interval_seconds,
        probe_failures=section.probe_failures,
    )


def served_model(
    section: RunnerSettings, model: ModelSettings, drain_seconds: float, context: ModelContext | None = None
) -> ServedModel:
    """Returns one model with one engine: replicas are separate models, see `with_replicas`.

    If this machine lacks something the model needs, each load builds it again and fails until it is available. If the
    extension of its runtime is off, its loads fail; nothing of that extension is imported.
    Raises INVALID_ARGUMENT naming a setting that conflicts with another one.
    """
    where = f"runners.{section.name}.models.{model.name}"
    if why := why_off(section.runtime, () if context is None else context.disabled):
        return _without_engine(model, WeftError(Reason.CONNECT_FAILED, f"{where}: {why}"))
    wake = model.wake if isinstance(model, SleepingModelSettings) else None
    own_context = context = replace(context or runner_context(section), where=where, lacks=[])
    if isinstance(model, FileModelSettings) and model.path is not None:
        context.require_file("path", model.weights_of(model.file))
    if isinstance(model, StartedModelSettings):
        context = replace(context, environment=engine_environment(model, context, section.engine.variables))
    engine = section.engine.build(model, context)
    category = model.category or category_of(engine.operations)
    hibernation = _hibernation(section, model, category, drain_seconds, where)
    if model.platform_prompt and Operation.CHAT not in engine.operations:
        raise invalid_field(f"{where}.platform_prompt", "is only for chat models; omit it")

    async def build_again(_: NoteFetch) -> ServedModel:
        again = await asyncio.to_thread(served_model, section, model, drain_seconds, own_context)
        if again.lack is not None:
            raise again.lack
        return again

    return ServedModel(
        **values_of(ModelEngine, engine),
        name=model.name,
        lack=context.lacks[0] if context.lacks else None,
        fetch=build_again if context.lacks else None,
        pool=model.pool or "",
        tags=tags_of(model, where),
        upstream_name=model.upstream_name,
        hibernation=hibernation,
        wake_by_mesh=_recipe(wake, f"{where}.wake") if wake is not None and wake.by == "mesh" else None,
        restart=section.restart,
        chat=chat_settings(section, model),
        target_inflight=model.target_inflight,
        adapters=tuple(
            ServedAdapter(
                name=adapter.name,
                pool=adapter.pool or "",
                file=adapter.digested_file,
                skills=_skills(adapter),
            )
            for adapter in model.served_adapters
        ),
        skills=_skills(model),
        journal=journal_mode_of(model.journal),
        declared_capabilities=replace(
            complete_list(_skills(model)),
            thinking_modes=frozenset(ThinkingMode[word.upper()] for word in model.thinking_modes),
            source_languages=model.source_languages,
            target_languages=model.target_languages,
        ),
    )


class EngineThatIsOff(Backend):
    """The engine of a disabled extension: its start fails with the reason."""

    def __init__(self, why: WeftError) -> None:
        """`why` is what starts and requests raise."""
        self.log = LogRing()
        self._why = why

    @override
    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        raise self._why

    @override
    async def responds(self, timeout_seconds: float) -> bool:
        return False

    @override
    async def wait_exit(self) -> ExitReport:
        raise self._why

    @override
    async def stop(self) -> None:
        pass

    @override
    def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        raise self._why


def _without_engine(model: ModelSettings, why: WeftError) -> ServedModel:
    return ServedModel(
        make_backend=lambda: EngineThatIsOff(why),
        operations=frozenset(Operation),  # unknown; requests of every kind get the reason
        name=model.name,
        pool=model.pool or "",
        lack=why,
    )


def _skills(model: ModelSettings | AdapterSettings) -> frozenset[Skill]:
    return frozenset(Skill[word.upper()] for word in model.skills)


def _hibernation(
    section: RunnerSettings, model: ModelSettings, category: str, drain_seconds: float, where: str
) -> HibernationSettings:
    attached = not section.engine.starts_engines
    wake = model.wake if isinstance(model, SleepingModelSettings) else None
    sleep = model.sleep if isinstance(model, SleepingModelSettings) else None
    if attached and sleep is not None and wake is None:
        raise invalid_field(f"{where}.sleep", "the server could not be woken again; add a wake recipe")
    by_runner = wake is not None and wake.by == "runner"
    keep_alive = model.keep_alive
    # Loads have a stall limit but no total limit, so a wake without a recipe may take as long as a stall.
    limit = DEFAULT_MAX_WAIT_SECONDS if attached else min(section.load_stall_seconds, MAX_WAIT_SECONDS)
    return HibernationSettings(
        attached=attached,
        start_asleep=isinstance(model, StartedModelSettings) and model.start_asleep,
        recipe=_recipe(wake, f"{where}.wake") if wake is not None and by_runner else None,
        woken_by_mesh=wake is not None and not by_runner,
        max_wait_seconds=limit if wake is None else wake.max_wait_seconds,
        sleep=None if sleep is None else _sleep(sleep, f"{where}.sleep"),
        drain_seconds=drain_seconds,
        attach_retry_seconds=section.probe_interval_seconds,
        keep_alive_seconds=None if keep_alive is None else keep_alive_seconds(keep_alive, f"{where}.keep_alive"),
        category=category,
        pinned=model.pin,
    )


def _sleep(section: settings.SleepSettings, where: str) -> SleepSettings:
    action = None if section.type == "unload" else _recipe(section, where)
    return SleepSettings(after_seconds=section.after_seconds, action=action, max_wait_seconds=section.max_wait_seconds)


def _recipe(section: WakeSettings | settings.SleepSettings, where: str) -> wake_pb2.WakeRecipe:
    """Raises INVALID_ARGUMENT naming the setting."""
    if isinstance(section, WakeSettings) and section.type == "wake_on_lan":
        packet = wake_pb2.WakeOnLanAction(
            mac_address=section.mac_address or "", broadcast_address=section.broadcast_address, port=section.port
        )
        check_message(packet, where)
        return wake_pb2.WakeRecipe(wake_on_lan=packet)
    if section.type == "http":
        request = wake_pb2.HttpAction(url=section.url or "", method=section.method, headers=section.headers)
        check_message(request, where)
        return wake_pb2.WakeRecipe(http=request)
    if not section.argv or not section.argv[0]:
        raise invalid_field(f"{where}.argv", "must begin with a program")
    command = wake_pb2.CommandAction(argv=section.argv)
    check_message(command, where)
    return wake_pb2.WakeRecipe(command=command)


def chat_settings(section: RunnerSettings, model: ModelSettings) -> ChatSettings:
    """Raises INVALID_ARGUMENT naming the field."""
    where = f"runners.{section.name}"
    for index, name in enumerate(model.tools):
        if not _is_offered(section, name):
            raise invalid_field(
                f"{where}.models.{model.name}.tools[{index}]", f"{name} is not among the tools of runner {section.name}"
            )
    return ChatSettings(
        tools=model.tools,
        repetition=model.repetition,
        tool_call_repair=model.tool_call_repair,
        default_max_tokens=model.default_max_tokens,
        default_params=_default_params(model, f"{where}.models.{model.name}.default_params"),
        signals=signal_catalogue(_signals(section.signals, f"{where}.signals")),
        max_tool_iterations=section.max_tool_iterations,
        zone=_zone(section.time_zone, f"{where}.time_zone"),
        platform_prompt=section.platform_prompt if model.platform_prompt is None else model.platform_prompt,
        platform_context=section.platform_context if model.platform_context is None else model.platform_context,
    )


def _default_params(model: ModelSettings, where: str) -> sampling_pb2.SamplingParams | None:
    if "max_tokens" in model.default_params:
        raise invalid_field(f"{where}.max_tokens", "is not supported here; use default_max_tokens")
    if "thinking" in model.default_params:
        raise invalid_field(f"{where}.thinking", "is not supported here; an alias or an agent can set it")
    if not model.default_params:
        return None
    return sampling_of(model.default_params, where)


def _is_offered(section: RunnerSettings, name: str) -> bool:
    """Whether a tool source of the runner may offer this name: an MCP server's tools are only known once it runs."""
    return any(
        name == tool.name if tool.type == "python" else name.startswith(f"{tool.name}.") for tool in section.tools
    )


def _signals(sections: tuple[SignalSettings, ...], where: str) -> list[SignalSettings]:
    signals: dict[str, SignalSettings] = {}
    for signal in sections:
        if signal.name in signals:
            raise invalid_field(f"{where}.{signal.name}", "two signals of one runner cannot share a name")
        try:
            parameters = object_schema(signal.parameters) if signal.parameters else reason_only()
        except ValueError as error:
            raise invalid_field(f"{where}.{signal.name}.parameters", str(error)) from None
        signals[signal.name] = replace(signal, parameters=parameters)
    return list(signals.values())


def _zone(name: str | None, field: str) -> tzinfo | None:
    if name is None:
        return None
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise invalid_field(field, f"{name} is not a time zone of this machine; use one such as UTC") from None
