"""The registry's view of the mesh, as candidates for the scheduler."""

from collections.abc import Iterator

from router_svc.policy.candidates import Candidate, Readiness
from weft.dispatch.fleet import FleetView, InstanceView, ModelView, Phase, RunnerView

_READINESS = {
    Phase.READY: Readiness.READY,
    Phase.IDLE: Readiness.LOADING,
    Phase.LOADING: Readiness.LOADING,
    # A backend that stops is restarted, unless its runner drains.
    Phase.STOPPING: Readiness.LOADING,
    Phase.DRAINING: Readiness.DOWN,
    Phase.CRASH_LOOP: Readiness.DOWN,
    Phase.FAILED: Readiness.DOWN,
}


def candidates_of(view: FleetView) -> Iterator[Candidate]:
    """Every model whose runner is known, ready or not."""
    for model in view.models.values():
        runner = view.runners.get(model.runner)
        if runner is not None:
            yield _candidate(model, runner, runner.instances.get(model.name))


def _candidate(model: ModelView, runner: RunnerView, instance: InstanceView | None) -> Candidate:
    if not (runner.active and model.active):
        readiness, detail = Readiness.DOWN, "not heard of"
    elif runner.draining:
        readiness, detail = Readiness.DOWN, "the runner is stopping"
    elif instance is None:
        readiness, detail = Readiness.LOADING, "no report yet"
    else:
        readiness, detail = _READINESS[instance.phase], instance.detail
    return Candidate(
        model=model.name,
        pool=model.pool,
        runner=runner.name,
        incarnation=runner.incarnation,
        readiness=readiness,
        slots=instance.slots_total if instance is not None else 0,
        slots_reported_used=instance.slots_used if instance is not None else 0,
        operations=model.operations,
        remote=model.remote,
        load_progress=instance.load_progress if instance is not None else None,
        detail=detail,
    )
