"""Conversion of the registry's messages to documents, and of documents to declarations.

The registry has checked what it tells, so parts that only it checks are taken over as they are: one odd row must not
make a whole list unreadable.
"""

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, assert_never, cast

from google.protobuf import duration_pb2

from weft.api.common.v1 import agent_behaviour_pb2, sampling_pb2
from weft.api.registry.v1 import (
    agent_pb2,
    declaration_service_pb2,
    event_pb2,
    model_pb2,
    pool_pb2,
    resource_kind_pb2,
    route_pb2,
    runner_pb2,
    wake_pb2,
)
from weft.documents.document_base import ResourceKind
from weft.documents.documents import (
    MESH,
    AgentDocument,
    CommandRecipeDocument,
    Document,
    EventDocument,
    HttpRecipeDocument,
    ModelDocument,
    PoolDocument,
    RecipeDocument,
    RouteDocument,
    RunnerDocument,
    SamplingDocument,
    WakeDocument,
    WakeOnLanRecipeDocument,
)
from weft.documents.statuses import (
    AgentStatus,
    InstanceStatus,
    MemberStatus,
    MemoryStatus,
    ModelStatus,
    PoolStatus,
    RouteStatus,
    RunnerStatus,
    agent_conditions,
    model_conditions,
    pool_conditions,
    route_conditions,
    runner_conditions,
)
from weft.wake.recipes import (
    DEFAULT_BROADCAST_ADDRESS,
    DEFAULT_METHOD,
    DEFAULT_WAKE_PORT,
    max_wait_seconds,
    mesh_recipe,
)

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp


def wake_message(document: WakeDocument) -> wake_pb2.Wake:
    """Converts a wake plan to its message."""
    message = wake_pb2.Wake(by_runner=document.by_runner)
    message.max_wait.FromNanoseconds(int(document.max_wait_seconds * 1e9))
    if document.by_mesh is not None:
        message.by_mesh.CopyFrom(_recipe(document.by_mesh))
    return message


def wake_document(message: wake_pb2.Wake) -> WakeDocument:
    """Converts a message to a part of a document."""
    recipe = mesh_recipe(message)
    return WakeDocument.model_construct(
        by_runner=message.by_runner,
        by_mesh=_recipe_document(recipe) if recipe is not None else None,
        max_wait_seconds=max_wait_seconds(message),
    )


def _recipe(document: RecipeDocument) -> wake_pb2.WakeRecipe:
    match document:
        case HttpRecipeDocument():
            http = wake_pb2.HttpAction(url=document.url, method=document.method, headers=document.headers)
            return wake_pb2.WakeRecipe(http=http)
        case CommandRecipeDocument():
            return wake_pb2.WakeRecipe(command=wake_pb2.CommandAction(argv=document.argv))
        case WakeOnLanRecipeDocument():
            packet = wake_pb2.WakeOnLanAction(
                mac_address=document.mac_address, broadcast_address=document.broadcast_address, port=document.port
            )
            return wake_pb2.WakeRecipe(wake_on_lan=packet)
    assert_never(document)


def _recipe_document(recipe: wake_pb2.WakeRecipe) -> RecipeDocument:
    match recipe.WhichOneof("action"):
        case "http":
            action = recipe.http
            http: dict[str, Any] = {"type": "http", "url": action.url, "method": action.method or DEFAULT_METHOD}
            return HttpRecipeDocument.model_construct(**http, headers=dict(action.headers))
        case "command":
            return CommandRecipeDocument.model_construct(type="command", argv=tuple(recipe.command.argv))
        case _:
            packet = recipe.wake_on_lan
            return WakeOnLanRecipeDocument.model_construct(
                type="wake_on_lan",
                mac_address=packet.mac_address,
                broadcast_address=packet.broadcast_address or DEFAULT_BROADCAST_ADDRESS,
                port=packet.port or DEFAULT_WAKE_PORT,
            )


_NANOSECONDS = 1e9


def route_manifest(document: RouteDocument) -> route_pb2.RouteManifest:
    """The declared content of a document."""
    return route_pb2.RouteManifest(
        name=document.name,
        description=document.description,
        candidates=document.candidates,
        budget=None if document.budget_seconds is None else _duration(document.budget_seconds),
        keep_alive=None if document.keep_alive is None else _duration(document.keep_alive),
        pin_primary=document.pin_primary,
    )


def route_fields(manifest: route_pb2.RouteManifest) -> dict[str, Any]:
    """The declared fields of a document."""
    return {
        "kind": "route",
        "name": manifest.name,
        "description": manifest.description,
        "candidates": tuple(manifest.candidates),
        "budget_seconds": _seconds(manifest.budget) if manifest.HasField("budget") else None,
        "keep_alive": _seconds(manifest.keep_alive) if manifest.HasField("keep_alive") else None,
        "pin_primary": manifest.pin_primary,
    }


def _seconds(length: duration_pb2.Duration) -> float:
    return length.ToNanoseconds() / _NANOSECONDS


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    nanoseconds = seconds * _NANOSECONDS
    # To the nearest, so that 8.3 is read back as 8.3; but less than a nanosecond must not become nothing.
    duration.FromNanoseconds(round(nanoseconds) or math.ceil(nanoseconds))
    return duration


_POLICIES: dict[str, agent_behaviour_pb2.RepetitionPolicy.ValueType] = {
    "off": agent_behaviour_pb2.REPETITION_POLICY_OFF,
    "warn": agent_behaviour_pb2.REPETITION_POLICY_WARN,
    "kill": agent_behaviour_pb2.REPETITION_POLICY_KILL,
}
_WORDS: dict[int, str] = {number: word for word, number in _POLICIES.items()}


def behaviour_message(document: AgentDocument) -> agent_behaviour_pb2.AgentBehaviour | None:
    """Converts an agent's behaviour to its message; None: it has none."""
    message = agent_behaviour_pb2.AgentBehaviour(
        platform_prompt=document.platform_prompt,
        tools=document.tools,
        max_tool_iterations=document.max_tool_iterations,
        signals=document.signals,
    )
    if document.repetition is not None:
        message.repetition_policy = _POLICIES[document.repetition]
    if not document.stop_on_decision_request:
        message.stop_on_decision_request = False
    if not document.parse_text_tool_calls:
        message.parse_text_tool_calls = False
    return message if message.ListFields() else None


def behaviour_fields(message: agent_behaviour_pb2.AgentBehaviour) -> dict[str, Any]:
    """Converts a behaviour message to fields of an agent's document."""
    return {
        "platform_prompt": message.platform_prompt,
        "tools": tuple(message.tools),
        "max_tool_iterations": message.max_tool_iterations if message.HasField("max_tool_iterations") else None,
        "signals": tuple(message.signals),
        "stop_on_decision_request": message.stop_on_decision_request
        or not message.HasField("stop_on_decision_request"),
        "repetition": _WORDS.get(message.repetition_policy),
        "parse_text_tool_calls": message.parse_text_tool_calls or not message.HasField("parse_text_tool_calls"),
    }


_OPERATION_PREFIX = "MODEL_OPERATION_"
_SKILL_PREFIX = "MODEL_SKILL_"


def kind_number(kind: ResourceKind) -> "resource_kind_pb2.ResourceKind.ValueType":
    """Returns the number of a kind."""
    return resource_kind_pb2.ResourceKind.Value(f"RESOURCE_KIND_{kind.name}")


def kind_from_number(number: int) -> ResourceKind:
    """Returns the kind of a number. Raises ValueError for an unset or unknown one."""
    return ResourceKind(resource_kind_pb2.ResourceKind.Name(cast("Any", number)).removeprefix("RESOURCE_KIND_").lower())


def model_document(model: model_pb2.Model, runner: runner_pb2.Runner | None = None) -> ModelDocument:
    """Converts a model; its runner, if given, provides the state of its instance."""
    declared = _model_fields(model.manifest, model.declared_runner)
    return ModelDocument.model_construct(**declared, status=_model_status(model, runner))


def agent_document(agent: agent_pb2.Agent) -> AgentDocument:
    """Converts an agent."""
    status = AgentStatus(
        kind=cast("Any", _last_word(agent_pb2.Agent.Kind, agent.kind)),
        state=cast("Any", _last_word(agent_pb2.Agent.Status, agent.status)),
        runner=agent.runner or None,
        created_at=_moment(agent, "create_time"),
        last_heartbeat_at=_moment(agent, "last_heartbeat_time"),
        inactive_since=_moment(agent, "inactive_time"),
    )
    target = f"{agent.manifest.WhichOneof('target') or 'model'}/{agent.manifest.model or agent.manifest.pool}"
    conditions = agent_conditions(status, target)
    return AgentDocument.model_construct(
        **_agent_fields(agent.manifest), status=status.model_copy(update={"conditions": conditions})
    )


def runner_document(runner: runner_pb2.Runner) -> RunnerDocument:
    """Converts a runner."""
    status = RunnerStatus(
        state=cast("Any", _last_word(runner_pb2.Runner.Status, runner.status)),
        incarnation=runner.incarnation,
        address=runner.address,
        link="dial-out" if runner.dial_out else "direct",
        host=runner.host,
        runtime=runner.runtime,
        version=runner.version,
        draining=runner.capability.draining,
        max_requests=runner.capability.max_requests or None,
        instances=tuple(_instance(state) for state in runner.capability.instances),
        clock_offset_seconds=runner.capability.clock_offset.ToNanoseconds() / 1e9 or None,
        clock_refused=runner.capability.clock_refused,
        last_heartbeat_at=_moment(runner, "last_heartbeat_time"),
        inactive_since=_moment(runner, "inactive_time"),
    )
    conditions = runner_conditions(status)
    return RunnerDocument.model_construct(
        kind="runner", name=runner.name, status=status.model_copy(update={"conditions": conditions})
    )


def pool_document(pool: pool_pb2.Pool) -> PoolDocument:
    """Converts a pool."""
    status = PoolStatus(
        explicit=pool.explicit,
        size=pool.size,
        active_count=pool.active_count,
        members=tuple(_member(model) for model in pool.members),
    )
    return PoolDocument.model_construct(
        kind="pool",
        name=pool.name,
        members=tuple(model.manifest.name for model in pool.members),
        status=status.model_copy(update={"conditions": pool_conditions(status)}),
    )


def route_document(route: route_pb2.Route) -> RouteDocument:
    """Converts a route."""
    status = RouteStatus(
        state=cast("Any", _last_word(route_pb2.Route.Status, route.status)), created_at=_moment(route, "create_time")
    )
    conditions = route_conditions(status)
    return RouteDocument.model_construct(
        **route_fields(route.manifest), status=status.model_copy(update={"conditions": conditions})
    )


def event_document(event: event_pb2.Event) -> EventDocument:
    """Converts an event."""
    return EventDocument(
        kind="event",
        sequence=event.sequence,
        time=event.time.ToDatetime(tzinfo=UTC),
        resource_kind=kind_from_number(event.kind) if event.kind else MESH,
        resource_name=event.name,
        reason=_reason(event.reason),
        message=event.message,
    )


def declared_document(declaration: declaration_service_pb2.Declaration) -> Document | None:
    """Converts a declaration to a document without `status`; None for an empty one."""
    match declaration.WhichOneof("resource"):
        case "model":
            return ModelDocument.model_construct(**_model_fields(declaration.model.manifest, declaration.model.runner))
        case "agent":
            return AgentDocument.model_construct(**_agent_fields(declaration.agent))
        case "runner":
            return RunnerDocument.model_construct(kind="runner", name=declaration.runner.name)
        case "pool":
            return PoolDocument.model_construct(
                kind="pool", name=declaration.pool.name, members=tuple(declaration.pool.members)
            )
        case "route":
            return RouteDocument.model_construct(**route_fields(declaration.route))
        case _:
            return None


def to_declaration(document: Document) -> declaration_service_pb2.Declaration:
    """Converts a document to its declaration, without `status`."""
    match document:
        case ModelDocument():
            model = declaration_service_pb2.ModelDeclaration(
                manifest=_model_manifest(document), runner=document.runner or ""
            )
            return declaration_service_pb2.Declaration(model=model)
        case AgentDocument():
            return declaration_service_pb2.Declaration(agent=_agent_manifest(document))
        case RunnerDocument():
            runner = declaration_service_pb2.RunnerDeclaration(name=document.name)
            return declaration_service_pb2.Declaration(runner=runner)
        case PoolDocument():
            pool = declaration_service_pb2.PoolDeclaration(name=document.name, members=document.members)
            return declaration_service_pb2.Declaration(pool=pool)
        case RouteDocument():
            return declaration_service_pb2.Declaration(route=route_manifest(document))


def _model_manifest(document: ModelDocument) -> model_pb2.ModelManifest:
    return model_pb2.ModelManifest(
        name=document.name,
        pool_name=document.pool_name or "",
        operations=[
            model_pb2.ModelOperation.Value(f"{_OPERATION_PREFIX}{operation.upper()}")
            for operation in document.operations
        ],
        context_tokens=document.context_tokens,
        digest=document.digest,
        remote=document.remote,
        wake=wake_message(document.wake) if document.wake is not None else None,
        skills=[model_pb2.ModelSkill.Value(f"{_SKILL_PREFIX}{skill.upper()}") for skill in document.skills],
    )


def _agent_manifest(document: AgentDocument) -> agent_pb2.AgentManifest:
    manifest = agent_pb2.AgentManifest(
        name=document.name,
        description=document.description,
        system_prompt=document.system_prompt,
        default_params=sampling_pb2.SamplingParams(**document.default_params.model_dump(exclude_none=True)),
        behaviour=behaviour_message(document),
    )
    if document.pool is not None:
        manifest.pool = document.pool
    else:
        manifest.model = document.model or ""
    return manifest


def _model_fields(manifest: model_pb2.ModelManifest, runner: str) -> dict[str, Any]:
    return {
        "kind": "model",
        "name": manifest.name,
        "pool_name": manifest.pool_name or None,
        "runner": runner or None,
        "operations": tuple(_words(model_pb2.ModelOperation, _OPERATION_PREFIX, manifest.operations)),
        "context_tokens": manifest.context_tokens,
        "digest": manifest.digest,
        "remote": manifest.remote,
        "wake": wake_document(manifest.wake) if manifest.HasField("wake") else None,
        "skills": tuple(_words(model_pb2.ModelSkill, _SKILL_PREFIX, manifest.skills)),
    }


def _agent_fields(manifest: agent_pb2.AgentManifest) -> dict[str, Any]:
    return {
        "kind": "agent",
        "name": manifest.name,
        "model": manifest.model or None,
        "pool": manifest.pool or None,
        "description": manifest.description,
        "system_prompt": manifest.system_prompt,
        "default_params": _sampling(manifest.default_params),
        **behaviour_fields(manifest.behaviour),
    }


def _sampling(params: sampling_pb2.SamplingParams) -> SamplingDocument:
    given: dict[str, Any] = {field.name: value for field, value in params.ListFields()}
    if params.stop:
        given["stop"] = tuple(params.stop)
    if params.logit_bias:
        given["logit_bias"] = dict(params.logit_bias)
    return SamplingDocument.model_construct(**given)


def _model_status(model: model_pb2.Model, runner: runner_pb2.Runner | None) -> ModelStatus:
    status = ModelStatus(
        kind=cast("Any", _last_word(model_pb2.Model.Kind, model.kind)),
        state=cast("Any", _last_word(model_pb2.Model.Status, model.status)),
        pool=model.manifest.pool_name or model.manifest.name,
        runner=model.runner or None,
        instance=_instance_of(model, runner),
        created_at=_moment(model, "create_time"),
        last_heartbeat_at=_moment(model, "last_heartbeat_time"),
        inactive_since=_moment(model, "inactive_time"),
    )
    return status.model_copy(update={"conditions": model_conditions(status)})


def _instance_of(model: model_pb2.Model, runner: runner_pb2.Runner | None) -> InstanceStatus | None:
    """Returns the model's state on its runner; None: it is served by another runner or none."""
    if runner is None or runner.name != model.runner or runner.status != runner_pb2.Runner.STATUS_ACTIVE:
        return None
    for state in runner.capability.instances:
        if state.model == model.manifest.name:
            return _instance(state)
    return None


def _instance(state: runner_pb2.InstanceState) -> InstanceStatus:
    return InstanceStatus(
        model=state.model,
        phase=cast("Any", _last_word(runner_pb2.InstanceState.Phase, state.phase)),
        slots_total=state.slots_total,
        slots_used=state.slots_used,
        load_progress=state.load_progress if state.HasField("load_progress") else None,
        context_tokens=state.context_tokens or None,
        detail=state.detail or None,
        memory=memory_status(state.memory) if state.HasField("memory") else None,
        unload_at=_moment(state, "unload_time"),
        pinned=state.pinned,
        load_eta_seconds=state.load_eta.ToNanoseconds() / 1e9 if state.HasField("load_eta") else None,
        fault_count=state.fault_count,
        last_fault=state.last_fault.detail or None,
    )


def memory_status(memory: runner_pb2.InstanceMemory) -> MemoryStatus:
    """Returns a model's accelerator memory."""
    return MemoryStatus(
        leased_bytes=memory.leased_bytes,
        measured_bytes=memory.measured_bytes if memory.HasField("measured_bytes") else None,
        estimated_bytes=memory.estimated_bytes or None,
        estimate_source=memory.estimate_source or None,
        device_indexes=tuple(memory.device_indexes),
    )


def _member(model: model_pb2.Model) -> MemberStatus:
    return MemberStatus(
        name=model.manifest.name,
        kind=cast("Any", _last_word(model_pb2.Model.Kind, model.kind)),
        state=cast("Any", _last_word(model_pb2.Model.Status, model.status)),
        runner=model.runner or None,
    )


def _words(enum: Any, prefix: str, numbers: Iterable[int]) -> Iterable[str]:
    names = [_name_of(enum, number) for number in numbers]
    return (name.removeprefix(prefix).lower() for name in names if name)


def _last_word(enum: Any, number: int) -> str:
    """Returns a phase as text: PHASE_CRASH_LOOP is "crash-loop"; an unset or unknown number is "unknown"."""
    return _name_of(enum, number).partition("_")[2].lower().replace("_", "-") or "unknown"


def _reason(number: int) -> str:
    return _name_of(event_pb2.EventReason, number).removeprefix("EVENT_REASON_").lower().replace("_", "-") or "unknown"


def _name_of(enum: Any, number: int) -> str:
    names: dict[int, str] = {value: name for name, value in enum.items() if value}
    return names.get(number, "")


def _moment(message: Any, field: str) -> datetime | None:
    if not message.HasField(field):
        return None
    moment: Timestamp = getattr(message, field)
    return moment.ToDatetime(tzinfo=UTC)
