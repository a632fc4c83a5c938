"""What `weft up` promises before its runners have come: the models and agents of its configuration."""

from collections.abc import Iterable, Iterator

from weft.dispatch.expected_fleet import ExpectedMesh, expected_model
from weft.dispatch.fleet import AgentView, ModelView
from weft_app.compose.published_agents import published_agents
from weft_app.config.replicas import with_replicas
from weft_app.config.runner_sections import RunnerSection, published_models


def expected_mesh(runners: Iterable[RunnerSection]) -> ExpectedMesh:
    """The models and agents that these runners will publish. Raises INVALID_ARGUMENT naming the field."""
    runners = tuple(runners)
    models = [model for runner in runners for model in _models(runner)]
    return ExpectedMesh(models, (agent for runner in runners for agent in _agents(runner)))


def _models(runner: RunnerSection) -> Iterator[ModelView]:
    for model in with_replicas(runner, tuple(published_models(runner))):
        yield expected_model(model.name, model.pool or "", runner.name)


def _agents(runner: RunnerSection) -> Iterator[AgentView]:
    for agent in published_agents(runner):
        yield AgentView(
            name=agent.name,
            target=agent.pool or agent.model,
            system_prompt=agent.system_prompt,
            default_params=agent.default_params,
            description=agent.description,
            created_at_seconds=0,
            targets_pool=bool(agent.pool),
            behaviour=agent.behaviour,
        )
