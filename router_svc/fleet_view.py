"""The registry's view of the mesh, as candidates for the scheduler."""

from types import MappingProxyType

from router_svc.policy.endpoints.candidates import Candidate, Readiness
from weft.dispatch.agents import members_of
from weft.dispatch.fleet import FleetView, InstanceView, ModelView, Phase, RunnerView
from weft.kernel.clock import refused_words
from weft.wake.recipes import WakePlan

_READINESS = {
    Phase.READY: Readiness.READY,
    Phase.IDLE: Readiness.LOADING,
    Phase.LOADING: Readiness.LOADING,
    # A backend that stops is restarted or goes to sleep, unless its runner drains.
    Phase.STOPPING: Readiness.LOADING,
    Phase.HIBERNATING: Readiness.ASLEEP,
    Phase.DRAINING: Readiness.DOWN,
    Phase.CRASH_LOOP: Readiness.DOWN,
    Phase.FAILED: Readiness.DOWN,
}
_EXPECTED = (Readiness.LOADING, "its runner is being started")
_BY_RUNNER = WakePlan(by_runner=True)


def candidate_of(view: FleetView, model: ModelView) -> Candidate:
    """One model as it is now."""
    runner = view.runners.get(model.runner)
    instance = runner.instances.get(model.name) if runner is not None else None
    readiness, detail = _EXPECTED if model.expected else _readiness(model, runner, instance)
    return Candidate(
        model=model.name,
        pool=model.pool,
        runner=model.runner,
        incarnation=runner.incarnation if runner is not None else "",
        readiness=readiness,
        slots=instance.slots_total if instance is not None else 0,
        slots_reported_used=instance.slots_used if instance is not None else 0,
        operations=model.operations,
        remote=model.remote,
        runner_max_requests=runner.max_requests if runner is not None else 0,
        runner_wakes=model.wake is not None and model.wake.by_runner,
        max_wake_seconds=wake_plan(model).max_wait_seconds,
        load_progress=instance.load_progress if instance is not None else None,
        load_eta_seconds=instance.load_eta_seconds if instance is not None else None,
        usual_load_seconds=instance.usual_load_seconds if instance is not None else None,
        detail=detail,
        host=runner.host if runner is not None else "",
        memory_bytes=_memory_bytes(instance),
        pinned=instance is not None and instance.pinned,
        skills=model.skills,
        tools=runner.tool_names if runner is not None else frozenset(),
        clock_refused=runner is not None and runner.active and runner.clock_refused,
        context_tokens=(instance.context_tokens if instance is not None else 0) or model.context_tokens,
    )


def _memory_bytes(instance: InstanceView | None) -> int:
    """What its lease says while it has one, else what a load would take."""
    if instance is None or instance.memory is None:
        return 0
    return instance.memory.leased_bytes or instance.memory.estimated_bytes


def view_of_runner(view: FleetView, runner: str) -> FleetView:
    """What one runner serves: its models, the pools as far as it is in them, the agents that these can answer for."""
    models = {name: model for name, model in view.models.items() if model.runner == runner}
    served = FleetView(
        view.revision,
        MappingProxyType({name: known for name, known in view.runners.items() if name == runner}),
        MappingProxyType(models),
    )
    agents = {name: agent for name, agent in view.agents.items() if members_of(served, agent)}
    return FleetView(served.revision, served.runners, served.models, MappingProxyType(agents))


def wake_plan(model: ModelView) -> WakePlan:
    """How to wake it when it sleeps. A model that declares nothing sleeps only when told to; its runner wakes it."""
    return model.wake or _BY_RUNNER


def _readiness(model: ModelView, runner: RunnerView | None, instance: InstanceView | None) -> tuple[Readiness, str]:
    if runner is None or not runner.active:
        # Also while the registry has only told of the runner and not yet of its models.
        if model.reachable and wake_plan(model).by_mesh is not None:
            return Readiness.ASLEEP, "its host sleeps"
        return Readiness.DOWN, "not heard of"
    if not model.reachable:
        return Readiness.DOWN, "not heard of"
    if runner.draining or runner.clock_refused:
        stopping = "the runner is stopping"
        return Readiness.DOWN, stopping if runner.draining else refused_words(runner.clock_offset_seconds)
    if instance is None:
        return Readiness.LOADING, "no report yet"
    return _READINESS[instance.phase], instance.detail
