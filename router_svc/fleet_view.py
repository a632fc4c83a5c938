"""The registry's view of the mesh as candidates for the scheduler, and the differences between two views."""

from types import MappingProxyType
from typing import Literal

from router_svc.policy.endpoints.candidates import Candidate, Readiness
from router_svc.policy.endpoints.cluster_view import MeshChange
from router_svc.policy.endpoints.engine_load import EngineFigures
from router_svc.policy.endpoints.route_conditions import RouteCondition
from router_svc.policy.endpoints.routes import Route
from weft.api.registry.v1 import route_pb2, wake_pb2
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch.agents import members_of
from weft.dispatch.fleet import FleetView, ModelView, RunnerView, capabilities_in, context_in
from weft.kernel.requests.placement_request import label_set
from weft.kernel.time.clock import refused_words
from weft.kernel.time.timestamps import optional_seconds
from weft.kernel.values.units import hours_of
from weft.wake.recipes import max_wait_seconds, mesh_recipe

_READINESS = {
    InstanceState.PHASE_READY: Readiness.READY,
    InstanceState.PHASE_IDLE: Readiness.LOADING,
    InstanceState.PHASE_LOADING: Readiness.LOADING,
    # A stopping backend restarts or falls asleep, unless its runner drains.
    InstanceState.PHASE_STOPPING: Readiness.LOADING,
    InstanceState.PHASE_HIBERNATING: Readiness.ASLEEP,
    InstanceState.PHASE_DRAINING: Readiness.DOWN,
    InstanceState.PHASE_CRASH_LOOP: Readiness.DOWN,
    InstanceState.PHASE_FAILED: Readiness.DOWN,
}
_EXPECTED = (Readiness.LOADING, "its runner is being started")
_BY_RUNNER = wake_pb2.Wake(by_runner=True)


def candidate_of(view: FleetView, model: ModelView) -> Candidate:
    """Return the candidate of a model in its current state."""
    runner = view.runners.get(model.runner)
    instance = runner.instances.get(model.name) if runner is not None else None
    readiness, detail = _EXPECTED if model.expected else _readiness(model, runner, instance)
    capabilities = capabilities_in(view, model)
    return Candidate(
        model=model.name,
        pool=model.pool,
        runner=model.runner,
        incarnation=runner.incarnation if runner is not None else "",
        readiness=readiness,
        slots=instance.slots_total if instance is not None else 0,
        slots_reported_used=instance.slots_used if instance is not None else 0,
        engine=_figures(instance),
        operations=model.operations,
        remote=model.remote,
        runner_max_requests=runner.max_requests if runner is not None else 0,
        runner_wakes=model.wake is not None and model.wake.by_runner,
        max_wake_seconds=max_wait_seconds(wake_plan(model)),
        load_progress=instance.load_progress if instance is not None and instance.HasField("load_progress") else None,
        load_eta_seconds=_seconds(instance, "load_eta"),
        usual_load_seconds=_seconds(instance, "usual_load"),
        detail=detail,
        host=runner.host if runner is not None else "",
        memory_bytes=_memory_bytes(instance),
        pinned=instance is not None and instance.pinned,
        skills=capabilities.possible_skills,
        thinking_modes=capabilities.thinking_modes,
        tools=runner.tool_names if runner is not None else frozenset(),
        labels=model.labels | (runner.labels if runner is not None else frozenset()),
        clock_refused=runner is not None and runner.active and runner.clock_refused,
        base_model=instance.base_model if instance is not None else "",
        state_kind=instance.state_kind if instance is not None else "",
        context_tokens=context_in(view, model),
    )


def _figures(instance: InstanceState | None) -> EngineFigures | None:
    if instance is None or not instance.engine_load.HasField("sample_time"):
        return None
    load = instance.engine_load
    return EngineFigures(
        sampled_at=load.sample_time.ToNanoseconds() / 1e9,
        running=load.running_count,
        waiting=load.waiting_count,
        others=load.other_count,
        cache_share=load.kv_cache_share,
    )


def _seconds(instance: InstanceState | None, field: Literal["load_eta", "usual_load"]) -> float | None:
    return None if instance is None else optional_seconds(instance, field)


def _memory_bytes(instance: InstanceState | None) -> int:
    """Return the memory of its lease, or the estimate for a load without one."""
    if instance is None:
        return 0
    return instance.memory.leased_bytes or instance.memory.estimated_bytes


def view_of_runner(view: FleetView, runner: str) -> FleetView:
    """Return a runner's part of a view: its models, their pools, and the agents that they can answer for."""
    models = {name: model for name, model in view.models.items() if model.runner == runner}
    served = FleetView(
        view.revision,
        MappingProxyType({name: known for name, known in view.runners.items() if name == runner}),
        MappingProxyType(models),
    )
    agents = {name: agent for name, agent in view.agents.items() if members_of(served, agent)}
    return FleetView(served.revision, served.runners, served.models, MappingProxyType(agents), settings=view.settings)


def wake_plan(model: ModelView) -> wake_pb2.Wake:
    """Return how to wake a model. Without a declaration a model sleeps only on request, and its runner wakes it."""
    return model.wake or _BY_RUNNER


def _readiness(model: ModelView, runner: RunnerView | None, instance: InstanceState | None) -> tuple[Readiness, str]:
    if runner is None or not runner.active:
        # Also while the registry has reported the runner but not yet its models.
        if model.reachable and mesh_recipe(wake_plan(model)) is not None:
            return Readiness.ASLEEP, "its host sleeps"
        return Readiness.DOWN, "no heartbeat"
    if not model.reachable:
        return Readiness.DOWN, "no heartbeat"
    if runner.draining or runner.clock_refused:
        stopping = "the runner is stopping"
        return Readiness.DOWN, stopping if runner.draining else refused_words(runner.clock_offset_seconds)
    if instance is None:
        return Readiness.LOADING, "no report yet"
    return _READINESS[instance.phase], instance.detail


class MeshDiff:
    """Compares each view with the previous one. Views share unchanged parts, so identity is compared."""

    def __init__(self) -> None:
        self.view = FleetView()
        """The last view; revision 0 before the first."""
        self._served_by: dict[str, list[ModelView]] = {}
        """Models of the last view, by runner."""

    def changes_to(self, view: FleetView) -> MeshChange:
        """Return the differences of `view`, which becomes the last view."""
        last, self.view = self.view, view
        return MeshChange(
            candidates=tuple(candidate_of(view, model) for model in self._changed(last, view)),
            gone=tuple(last.models.keys() - view.models.keys()),
            routes={name: _route(route.manifest) for name, route in view.routes.items()}
            if view.routes is not last.routes
            else None,
            cloud_fallback=view.settings.allow_cloud_fallback if view.settings is not last.settings else None,
        )

    def _changed(self, last: FleetView, view: FleetView) -> list[ModelView]:
        """Return the models that changed or are on a changed runner.

        Most changes concern one runner of a mesh with thousands of models, so models are compared only if any changed.
        """
        runners = {name for name, runner in view.runners.items() if last.runners.get(name) is not runner}
        runners |= last.runners.keys() - view.runners.keys()
        if view.models is last.models:
            return [model for runner in sorted(runners) for model in self._served_by.get(runner, ())]
        self._served_by = {}
        for model in view.models.values():
            self._served_by.setdefault(model.runner, []).append(model)
        return [
            model
            for name, model in view.models.items()
            if last.models.get(name) is not model or model.runner in runners
        ]


def _route(route: route_pb2.RouteManifest) -> Route:
    return Route(
        name=route.name,
        candidates=tuple(route.candidates),
        budget_seconds=optional_seconds(route, "budget"),
        keep_alive_seconds=optional_seconds(route, "keep_alive"),
        pin_primary=route.pin_primary,
        conditions=tuple(map(_condition, route.conditions)),
    )


def _condition(condition: route_pb2.RouteCondition) -> RouteCondition:
    first, last = hours_of(condition.hours, "hours")
    return RouteCondition(
        candidate=condition.candidate,
        min_prompt_tokens=condition.min_prompt_tokens,
        max_prompt_tokens=condition.max_prompt_tokens,
        tools=condition.tools if condition.HasField("tools") else None,
        images=condition.images if condition.HasField("images") else None,
        allow_remote=condition.allow_remote if condition.HasField("allow_remote") else None,
        tenants=tuple(condition.tenants),
        from_hour=first,
        to_hour=last,
        labels=label_set(condition.labels),
        runner_labels=label_set(condition.runner_labels),
        min_budget=condition.min_budget_percent / 100,
    )
