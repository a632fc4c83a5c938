"""GET /v1/admin/models and /v1/admin/gpu-memory, and loads, unloads and cache flushes."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.admin_operations import SURFACE, Admin, AdminPorts, accept_operation
from gateway.admin.engine_logs import MAX_LINES
from gateway.admin.schemas import FlushBody, LoadBody, PullBody, SourceLoadBody, UnloadBody
from gateway.answers.unary import json_response
from gateway.deps import Gateway, GatewayDeps
from gateway.intake.query import begin_read
from gateway.operation_client import read_body
from gateway.resources.resource_handlers import known_name_of
from weft.api.gateway.v1 import admin_model_pb2 as pb
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.api.runner.v1 import runner_service_pb2
from weft.dispatch.fleet import FleetView, ModelView, capabilities_in, context_in, file_in
from weft.dispatch.operation_table import OPERATIONS
from weft.documents.codec import document_of, word_of
from weft.documents.computed import CONTEXT_TOKENS
from weft.documents.load_values import require_loadable
from weft.documents.operation_actions import (
    LoadSettings,
    flush_action,
    load_action,
    pull_action,
    remove_action,
    unload_action,
)
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field, renaming_fields
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.capabilities import Capabilities
from weft.kernel.requests.placement_request import PoolQueue
from weft.kernel.requests.request_values import Operation, Skill
from weft.kernel.values.names import require_name
from weft.kernel.values.unknown_names import MODEL_OR_POOL, unknown_name


async def get_discovered(ports: Admin, request: Request) -> Response:
    """Returns engines and model files of other programs on the mesh's machine, with the `source` of each."""
    begin_read(request, SURFACE)
    return json_response(document_of(await ports.discovery()))


CATALOG_PARAMETERS = ("q", "source")
MAX_SEARCH_CHARS = 200


async def get_catalog(ports: Admin, request: Request) -> Response:
    """Returns models to pull with their estimated memory: those that match `q`, or the quantizations of a `source`."""
    query = begin_read(request, SURFACE, CATALOG_PARAMETERS)
    text, source = query.text("q"), query.text("source")
    if text and source:
        raise invalid_field("source", "cannot be combined with q")
    if len(text) > MAX_SEARCH_CHARS:
        raise invalid_field("q", f"must have at most {MAX_SEARCH_CHARS} characters")
    return json_response(document_of(await ports.catalog(text, source, await ports.operations.host_memory(""))))


INSTANCE_PARAMETERS = ("lines",)
InstanceDescriptions = Mapping[str, Mapping[str, runner_service_pb2.InstanceDescription]]
"""Instance descriptions from the runners, by runner and model."""

GONE, UNOWNED = "gone", "unowned"
_BEST_FIRST = ("ready", "loading", "stopping", "hibernating", "draining", "idle", "crash-loop", "failed", GONE)
_ISOLATION = "CACHE_ISOLATION_"
STREAMED = frozenset(operation for operation, spec in OPERATIONS.items() if spec.streamed)


def public_names(view: FleetView) -> dict[str, list[ModelView]]:
    """Returns the members behind each public name, sorted by name."""
    pools: dict[str, list[ModelView]] = {}
    for model in sorted(view.models.values(), key=lambda one: one.name):
        pools.setdefault(model.pool, []).append(model)
    return dict(sorted(pools.items()))


def runners_of(members: Iterable[ModelView]) -> list[str]:
    """Returns the names of the runners that serve the models."""
    return sorted({member.runner for member in members if member.runner})


def admin_model(
    view: FleetView,
    name: str,
    members: Sequence[ModelView],
    queues: Sequence[PoolQueue] | None,
    described: InstanceDescriptions,
) -> pb.AdminModel:
    """Returns one public name with its replicas. `queues`: None: the router is unreachable."""
    reported = [described.get(member.runner, {}).get(member.name) for member in members]
    replicas = list(map(partial(_replica, view), members, reported))
    descriptions = [one for one in reported if one is not None]
    queue = next((one for one in queues or () if one.pool == name), None)
    return pb.AdminModel(
        name=name,
        state=min((replica.state for replica in replicas), key=_BEST_FIRST.index),
        definition=_definition(view, members, descriptions),
        queue=None if queue is None else _queue(queue),
        replicas=pb.Replicas(
            ready=sum(replica.state == "ready" for replica in replicas), total=len(replicas), members=replicas
        ),
        capabilities=_capabilities(view, members, descriptions),
        constraints=_constraints(descriptions),
    )


def unowned_engines(view: FleetView, described: InstanceDescriptions) -> list[pb.Replica]:
    """Returns engines that runners have started for models that they no longer publish."""
    return [
        pb.Replica(
            model=name,
            runner=runner.name,
            host=runner.host,
            state=UNOWNED,
            detail="the runner no longer publishes it",
            slots_used=len(instance.active_request_ids),
            process_id=instance.process_id,
            restart_count=instance.restart_count,
        )
        for runner in view.runners.values()
        for name, instance in described.get(runner.name, {}).items()
        if instance.process_id and name not in runner.instances
    ]


def model_memory(view: FleetView) -> list[pb.ModelMemory]:
    """Returns the memory of each model whose runner reports it, sorted by name."""
    found = []
    for model in sorted(view.models.values(), key=lambda one: one.name):
        instance, runner = _instance(view, model), view.runners.get(model.runner)
        if instance is not None and runner is not None and instance.HasField("memory"):
            found.append(
                pb.ModelMemory(
                    model=model.name,
                    runner=runner.name,
                    host=runner.host,
                    state=word_of(instance, "phase"),
                    memory=instance.memory,
                )
            )
    return found


def _instance(view: FleetView, model: ModelView) -> InstanceState | None:
    runner = view.runners.get(model.runner)
    return runner.instances.get(model.name) if runner is not None and runner.active else None


_OPTIONAL: tuple[Literal["load_progress", "load_eta", "memory", "unload_time"], ...] = (
    "load_progress",
    "load_eta",
    "memory",
    "unload_time",
)


def _replica(view: FleetView, model: ModelView, described: runner_service_pb2.InstanceDescription | None) -> pb.Replica:
    runner, instance = view.runners.get(model.runner), _instance(view, model)
    host = runner.host if runner is not None else None
    if instance is None:
        state = "hibernating" if model.hibernating else GONE
        return pb.Replica(model=model.name, runner=model.runner, host=host, state=state)
    reported: dict[str, Any] = {name: getattr(instance, name) for name in _OPTIONAL if instance.HasField(name)}
    return pb.Replica(
        **reported,
        model=model.name,
        runner=model.runner,
        host=host,
        state=word_of(instance, "phase"),
        detail=instance.detail,
        context_tokens=context_in(view, model),
        slots_used=instance.slots_used,
        slots_total=instance.slots_total,
        pinned=instance.pinned,
        process_id=described.process_id if described is not None else 0,
        restart_count=described.restart_count if described is not None else 0,
        cache=described.cache if described is not None and described.HasField("cache") else None,
    )


def _definition(
    view: FleetView, members: Sequence[ModelView], descriptions: Sequence[runner_service_pb2.InstanceDescription]
) -> pb.Definition:
    runners = [view.runners[name] for name in runners_of(members) if name in view.runners]
    operations = set[Operation]().union(*(member.operations for member in members))
    return pb.Definition(
        operations=[operation.name.lower() for operation in sorted(operations)],
        context_tokens=context_in(view, *members),
        remote=any(member.remote for member in members),
        runtimes=sorted({runner.runtime for runner in runners}),
        model_paths=sorted({one.model_path for one in descriptions if one.model_path}),
    )


def _queue(queue: PoolQueue) -> pb.Queue:
    return pb.Queue(waiting=queue.waiting, max_waiting=queue.max_waiting, running=queue.running)


def _capabilities(
    view: FleetView, members: Sequence[ModelView], descriptions: Sequence[runner_service_pb2.InstanceDescription]
) -> pb.Capabilities:
    operations = set[Operation]().union(*(member.operations for member in members))
    isolation = {runner_service_pb2.CacheIsolation.Name(one.cache_isolation) for one in descriptions}
    known = [capabilities_in(view, member) for member in members]
    skills = frozenset[Skill]().union(*(one.skills for one in known))
    takes_images = Skill.IMAGE in skills or any(one.vision_input for one in descriptions)
    images = [pb.MODALITY_IMAGE] if takes_images else []
    audio = [pb.MODALITY_AUDIO] if Skill.AUDIO in skills else []
    numbers: dict[str, Any] = {"thinking_modes": sorted({mode for one in known for mode in one.thinking_modes})}
    return pb.Capabilities(
        **numbers,
        modalities=[pb.MODALITY_TEXT, *images, *audio],
        tools=_calls_tools(known),
        source_languages=sorted({language for one in known for language in one.source_languages}),
        target_languages=sorted({language for one in known for language in one.target_languages}),
        streaming=bool(operations & STREAMED),
        multi_turn=Operation.CHAT in operations,
        embeddings=Operation.EMBEDDING in operations,
        cache_isolation=sorted(
            name.removeprefix(_ISOLATION).lower() for name in isolation if not name.endswith("UNSPECIFIED")
        ),
    )


def _calls_tools(known: Sequence[Capabilities]) -> bool | None:
    """Whether a member supports tool calls; None: no member is known to, and some are unknown."""
    if any(Skill.TOOLS in one.skills for one in known):
        return True
    return False if all(Skill.TOOLS in one.lacking for one in known) else None


def _constraints(descriptions: Sequence[runner_service_pb2.InstanceDescription]) -> pb.Constraints:
    """Merges the load parameters of the members; if several have one, the first member's range applies."""
    parameters = {one.name: one for description in reversed(descriptions) for one in description.load_parameters}
    return pb.Constraints(
        parameters=[one for _, one in sorted(parameters.items())],
        quantizations=sorted({word for description in descriptions for word in description.quantizations}),
    )


async def list_admin_models(deps: Gateway, ports: Admin, request: Request) -> Response:
    """Lists all models by public name, with definition, state, queue, replicas, capabilities and load options."""
    _begin(request)
    view = deps.fleet.view
    models, described = await _admin_models(deps, ports, public_names(view), list(view.runners))
    return json_response(document_of(pb.AdminModelList(items=models, unowned=unowned_engines(view, described))))


async def get_admin_model(deps: Gateway, ports: Admin, request: Request) -> Response:
    """Returns one model, by the name of its pool or of a member."""
    _begin(request)
    name = known_name_of(request, deps)
    view = deps.fleet.view
    found = view.pool_members(name)
    if not found:
        raise unknown_name(MODEL_OR_POOL, name)
    names = {found[0].pool: sorted(found, key=lambda one: one.name)}
    (model,), _ = await _admin_models(deps, ports, names, runners_of(found))
    return json_response(document_of(model))


async def get_gpu_memory(deps: Gateway, ports: Admin, request: Request) -> Response:
    """Returns the accelerator memory and leases of each host, and the used or estimated memory of each model."""
    query = begin_read(request, SURFACE, ("host",))
    host = query.text("host")
    hosts = await ports.operations.host_memory(host)
    models = [one for one in model_memory(deps.fleet.view) if host in ("", one.host)]
    if host and not hosts and not models:
        raise FieldError("host", "is unknown; GET /v1/admin/gpu-memory without it lists all hosts", Reason.NOT_FOUND)
    return json_response(document_of(pb.GpuMemory(hosts=hosts, models=models)))


async def get_instances(ports: Admin, request: Request) -> Response:
    """Returns a runner's description of its engines: processes, restarts, load options and last log lines."""
    query = begin_read(request, SURFACE, INSTANCE_PARAMETERS)
    name, lines = require_name(request.path_params["name"], "name"), query.count("lines", MAX_LINES)
    return json_response(document_of(await ports.instances.describe(name, lines)))


async def load_model(deps: Gateway, ports: Admin, request: Request) -> Response:
    """Loads a model, or reloads it with other options. Answers 202 with the operation."""
    body = await read_body(request, deps.config, LoadBody, SURFACE, optional=True)
    settings = LoadSettings.model_construct(**{name: getattr(body, name) for name in LoadSettings.model_fields})
    name = known_name_of(request, deps)
    action = load_action(name, settings, evict_model=body.evict_model or "", replicas=body.replicas or 0)
    options = action.load_model.options
    if options.parameters or options.quantization:
        view = deps.fleet.view
        named = view.models.get(name)
        members = view.pool_members(name) if named is None or body.replicas else [named]
        described = await ports.instances.instances(runners_of(members))
        found = (described.get(member.runner, {}).get(member.name) for member in members)
        own = {member.name: file_in(view, member).quantization for member in members}
        with renaming_fields(_names_in(body)):
            require_loadable(options, [one for one in found if one is not None], own)
    return await accept_operation(request, ports, action, body.authorization)


async def unload_model(deps: Gateway, ports: Admin, request: Request) -> Response:
    """Unloads a model, or all members of a pool. Answers 202 with the operation."""
    body = await read_body(request, deps.config, UnloadBody, SURFACE, optional=True)
    return await accept_operation(request, ports, unload_action(known_name_of(request, deps)), body.authorization)


async def load_source(deps: Gateway, ports: Admin, request: Request) -> Response:
    """Adds a model by its source, and loads it. Answers 202 with the operation."""
    body = await read_body(request, deps.config, SourceLoadBody, SURFACE)
    if body.quantization is not None:
        raise invalid_field("quantization", "is part of the source, such as hf:OWNER/REPO:Q4_K_M")
    settings = LoadSettings.model_construct(**{name: getattr(body, name) for name in LoadSettings.model_fields})
    action = load_action(
        body.name or "", settings, evict_model=body.evict_model or "", source=body.source, runner=body.runner or ""
    )
    with renaming_fields(_names_in(body)):
        return await accept_operation(request, ports, action, body.authorization)


def _names_in(body: LoadSettings) -> Callable[[str], str]:
    """Returns the name of a field in the body of a load: the context is a parameter, or a field."""
    context_field = f"parameters.{CONTEXT_TOKENS}"
    return lambda field: "contextTokens" if field == context_field and body.context_tokens is not None else field


async def pull_model(deps: Gateway, ports: Admin, request: Request) -> Response:
    """Pulls the files of a model into a runner's model store. Answers 202 with the operation."""
    body = await read_body(request, deps.config, PullBody, SURFACE)
    action = pull_action(body.source, runner=body.runner or "", form=body.form)
    return await accept_operation(request, ports, action, body.authorization)


async def remove_model(deps: Gateway, ports: Admin, request: Request) -> Response:
    """Removes a model that was added by its source. Answers 202 with the operation."""
    body = await read_body(request, deps.config, UnloadBody, SURFACE, optional=True)
    return await accept_operation(request, ports, remove_action(known_name_of(request, deps)), body.authorization)


async def detach_server(deps: Gateway, ports: Admin, request: Request) -> Response:
    """Detaches an attached server. Answers 202 with the operation."""
    body = await read_body(request, deps.config, UnloadBody, SURFACE, optional=True)
    name = require_name(request.path_params["name"], "name")
    return await accept_operation(request, ports, remove_action(name), body.authorization)


async def flush_cache(deps: Gateway, ports: Admin, request: Request) -> Response:
    """Deletes cached prefixes. Answers 202 with the operation."""
    body = await read_body(request, deps.config, FlushBody, SURFACE, optional=True)
    action = flush_action(
        body.scope, model=body.model or "", tenant=body.tenant, tag=body.tag, runner=body.runner or ""
    )
    return await accept_operation(request, ports, action, body.authorization)


def _begin(request: Request) -> None:
    begin_read(request, SURFACE)


async def _admin_models(
    deps: GatewayDeps, ports: AdminPorts, names: Mapping[str, list[ModelView]], runners: Sequence[str]
) -> tuple[list[pb.AdminModel], InstanceDescriptions]:
    """Returns models, and the runners' descriptions of their engines."""
    queues, described = await asyncio.gather(_queues(ports), ports.instances.instances(runners))
    view = deps.fleet.view
    return [admin_model(view, name, found, queues, described) for name, found in names.items()], described


async def _queues(ports: AdminPorts) -> Sequence[PoolQueue] | None:
    """Returns the queues; None: the router is unreachable, and models are listed without queues."""
    try:
        return await ports.queues.queues()
    except WeftError:
        return None
