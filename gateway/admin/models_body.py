"""Models with all that is known of them: the fleet, the queues and what runners say, put together."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC

from gateway.admin.schemas import (
    AdminModelDocument,
    CapabilitiesDocument,
    ConstraintsDocument,
    DefinitionDocument,
    ModelMemoryDocument,
    QueueDocument,
    ReplicaDocument,
    ReplicasDocument,
)
from weft.api.runner.v1 import runner_service_pb2
from weft.dispatch.fleet import FleetView, InstanceView, ModelView, Phase
from weft.dispatch.placement import PoolQueue
from weft.documents.messages import memory_status
from weft.documents.operation_messages import parameter_document
from weft.kernel.request import Operation

Described = Mapping[str, Mapping[str, runner_service_pb2.InstanceDescription]]
"""What runners said of their instances, by runner and model."""

GONE = "gone"
_BEST_FIRST = ("ready", "loading", "stopping", "hibernating", "draining", "idle", "crash-loop", "failed", GONE)
_ISOLATION = "CACHE_ISOLATION_"
STREAMED = frozenset({Operation.CHAT, Operation.COMPLETION, Operation.SPEECH})


def public_names(view: FleetView) -> dict[str, list[ModelView]]:
    """The members behind each public name, by name."""
    pools: dict[str, list[ModelView]] = {}
    for model in sorted(view.models.values(), key=lambda one: one.name):
        pools.setdefault(model.pool, []).append(model)
    return dict(sorted(pools.items()))


def runners_of(members: Iterable[ModelView]) -> list[str]:
    """The runners that serve some models."""
    return sorted({member.runner for member in members if member.runner})


def admin_model(
    view: FleetView, name: str, members: Sequence[ModelView], queues: Sequence[PoolQueue] | None, described: Described
) -> AdminModelDocument:
    """One public name. `queues` is None while the router cannot be asked."""
    replicas = [_replica(view, member) for member in members]
    said = [described.get(member.runner, {}).get(member.name) for member in members]
    answered = [one for one in said if one is not None]
    queue = None if queues is None else next((one for one in queues if one.pool == name), None)
    return AdminModelDocument(
        kind="adminModel",
        name=name,
        state=min((replica.state for replica in replicas), key=_BEST_FIRST.index),
        definition=_definition(view, members, answered),
        queue=None if queue is None else _queue(queue),
        replicas=ReplicasDocument(
            ready=sum(replica.state == "ready" for replica in replicas), total=len(replicas), members=tuple(replicas)
        ),
        capabilities=_capabilities(members, answered),
        constraints=_constraints(answered),
    )


def model_memory(view: FleetView) -> list[ModelMemoryDocument]:
    """What every model takes or would take, where its runner says anything of it; by name."""
    found = []
    for model in sorted(view.models.values(), key=lambda one: one.name):
        instance, runner = _instance(view, model), view.runners.get(model.runner)
        if instance is not None and runner is not None and instance.memory is not None:
            found.append(
                ModelMemoryDocument(
                    model=model.name,
                    runner=runner.name,
                    host=runner.host,
                    state=_state(instance),
                    memory=memory_status(instance.memory),
                )
            )
    return found


def _instance(view: FleetView, model: ModelView) -> InstanceView | None:
    runner = view.runners.get(model.runner)
    return runner.instances.get(model.name) if runner is not None and runner.active else None


def _state(instance: InstanceView) -> str:
    return instance.phase.name.lower().replace("_", "-")


def _replica(view: FleetView, model: ModelView) -> ReplicaDocument:
    runner, instance = view.runners.get(model.runner), _instance(view, model)
    host = runner.host if runner is not None else None
    if instance is None:
        asleep = model.hibernating
        state = Phase.HIBERNATING.name.lower() if asleep else GONE
        return ReplicaDocument(
            model=model.name, runner=model.runner or None, host=host, state=state, slots_used=0, slots_total=0
        )
    return ReplicaDocument(
        model=model.name,
        runner=model.runner,
        host=host,
        state=_state(instance),
        detail=instance.detail or None,
        load_progress=instance.load_progress,
        load_eta_seconds=instance.load_eta_seconds,
        context_tokens=instance.context_tokens or model.context_tokens or None,
        slots_used=instance.slots_used,
        slots_total=instance.slots_total,
        memory=None if instance.memory is None else memory_status(instance.memory),
        unload_at=None if instance.unload_time is None else instance.unload_time.ToDatetime(tzinfo=UTC),
        pinned=instance.pinned,
    )


def _definition(
    view: FleetView, members: Sequence[ModelView], answered: Sequence[runner_service_pb2.InstanceDescription]
) -> DefinitionDocument:
    runners = [view.runners[name] for name in runners_of(members) if name in view.runners]
    return DefinitionDocument(
        operations=_operations(members),
        context_tokens=min((member.context_tokens for member in members if member.context_tokens), default=None),
        remote=any(member.remote for member in members),
        runtimes=tuple(sorted({runner.runtime for runner in runners})),
        model_paths=tuple(sorted({one.model_path for one in answered if one.model_path})),
    )


def _operations(members: Iterable[ModelView]) -> tuple[str, ...]:
    found: set[Operation] = set().union(*(member.operations for member in members))
    return tuple(operation.name.lower() for operation in sorted(found))


def _queue(queue: PoolQueue) -> QueueDocument:
    return QueueDocument(waiting=queue.waiting, max_waiting=queue.max_waiting, running=queue.running)


def _capabilities(
    members: Sequence[ModelView], answered: Sequence[runner_service_pb2.InstanceDescription]
) -> CapabilitiesDocument:
    operations = set().union(*(member.operations for member in members))
    isolation = {runner_service_pb2.CacheIsolation.Name(one.cache_isolation) for one in answered}
    return CapabilitiesDocument(
        modalities=("text", "image") if any(one.vision_input for one in answered) else ("text",),
        streaming=bool(operations & STREAMED),
        multi_turn=Operation.CHAT in operations,
        embeddings=Operation.EMBEDDING in operations,
        cache_isolation=tuple(
            sorted(name.removeprefix(_ISOLATION).lower() for name in isolation if not name.endswith("UNSPECIFIED"))
        ),
    )


def _constraints(answered: Sequence[runner_service_pb2.InstanceDescription]) -> ConstraintsDocument:
    """What may be set for some member: the first that has a parameter says what it may be."""
    parameters = {one.name: one for description in reversed(answered) for one in description.load_parameters}
    return ConstraintsDocument(
        parameters=tuple(parameter_document(one) for _, one in sorted(parameters.items())),
        quantizations=tuple(sorted({word for description in answered for word in description.quantizations})),
    )
