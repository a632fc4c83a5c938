"""Replicas of a model: identical engines under names of their own, in one pool."""

from dataclasses import replace

from runner_svc.runtimes.settings import ModelSettings, StartedModelSettings
from weft.kernel.errors import invalid_field
from weft.kernel.names import require_name
from weft_app.config.runner_sections import RunnerSection


def with_replicas(section: RunnerSection, models: tuple[ModelSettings, ...]) -> tuple[ModelSettings, ...]:
    """`models` of a runner, each followed by its replicas: "qwen", "qwen-2", "qwen-3".

    Those beyond `replicas` start asleep. Raises INVALID_ARGUMENT naming the field.
    """
    taken = {model.name for model in section.models} | {agent.name for agent in section.agents}
    expanded: list[ModelSettings] = []
    for model in models:
        replicas = _replicas(section, model)
        for replica in replicas[1:]:
            if replica.name in taken:
                raise invalid_field(
                    f"runners.{section.name}.models.{model.name}.replicas",
                    f"the replica {replica.name} would have the name of another model or agent; rename that one",
                )
            taken.add(replica.name)
        expanded += replicas
    return tuple(expanded)


def replica_names(model: ModelSettings) -> tuple[str, ...]:
    """What a model and its replicas are called: "qwen", "qwen-2", "qwen-3"."""
    return model.name, *(f"{model.name}-{number}" for number in range(2, _count(model) + 1))


def _count(model: ModelSettings) -> int:
    if not isinstance(model, StartedModelSettings):
        return 1
    return model.replicas if model.replica_max is None else model.replica_max


def _replicas(section: RunnerSection, model: ModelSettings) -> list[ModelSettings]:
    where = f"runners.{section.name}.models.{model.name}"
    count = _count(model)
    if not isinstance(model, StartedModelSettings):
        return [model]
    if count < model.replicas:
        raise invalid_field(f"{where}.replica_max", f"must be at least {model.replicas}, which is `replicas`")
    if count == 1:
        return [model]
    return [
        replace(
            model,
            replicas=1,
            replica_max=None,
            pool=model.pool or model.name,
            name=require_name(name, f"{where}.replicas"),
            start_asleep=model.start_asleep or number > model.replicas,
        )
        for number, name in enumerate(replica_names(model), 1)
    ]
