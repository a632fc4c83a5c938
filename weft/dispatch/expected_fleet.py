"""What a configuration promises while its runners are being started: models and agents that are known in advance.

Requests for them wait as for any model that loads. None of them counts as one that can answer: `ModelView.reachable`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from weft.dispatch.fleet import AgentView, FleetSource, FleetView, ModelView
from weft.kernel.request import Operation

T = TypeVar("T")


def expected_model(name: str, pool: str, runner: str) -> ModelView:
    """A model of which only the configuration is known: it counts as one that can do everything."""
    return ModelView(
        name=name,
        pool=pool or name,
        runner=runner,
        operations=frozenset(Operation),
        remote=False,
        active=False,
        context_tokens=0,
        created_at_seconds=0,
        expected=True,
    )


class ExpectedMesh:
    """Models and agents by name that are shown until their runners have come, or until nothing is expected any more.

    Each reader of the mesh has its own: what one reader has seen come, another may still wait for.
    """

    def __init__(self, models: Iterable[ModelView] = (), agents: Iterable[AgentView] = ()) -> None:
        self._models = {model.name: model for model in models}
        self._agents = {agent.name: agent for agent in agents}

    def clear(self) -> None:
        """Ends the expectation: from now on a missing model is unknown."""
        self._models.clear()
        self._agents.clear()

    def shown(self, view: FleetView) -> FleetView:
        """`view` with what is expected and not there yet. What has arrived once is not expected again."""
        if not (self._models or self._agents) or view.revision == 0:
            return view
        for name in [name for name in self._models if _has_come(view, view.models.get(name))]:
            del self._models[name]
        for name in [name for name in self._agents if _answers(view.agents.get(name))]:
            del self._agents[name]
        return replace(view, models=_with(view.models, self._models), agents=_with(view.agents, self._agents))


class ExpectingFleet:
    """A FleetSource that shows what is expected beside what is there."""

    def __init__(self, fleet: FleetSource, expected: ExpectedMesh) -> None:
        self._fleet = fleet
        self._expected = expected

    @property
    def view(self) -> FleetView:
        """See FleetSource.view."""
        return self._expected.shown(self._fleet.view)


def _has_come(view: FleetView, model: ModelView | None) -> bool:
    """Whether a model and its runner are both there; their changes arrive one after the other."""
    if model is None or not model.reachable:
        return False
    runner = view.runners.get(model.runner)
    return runner is not None and runner.active


def _answers(agent: AgentView | None) -> bool:
    return agent is not None and not agent.runner_gone


def _with(known: Mapping[str, T], expected: Mapping[str, T]) -> Mapping[str, T]:
    return MappingProxyType({**known, **expected}) if expected else known
