"""Converts the configured agents of a runner to published manifests."""

from runner_svc.runner_settings import AgentSettings, RunnerSettings
from runner_svc.runtimes.runtime_settings import ModelSettings
from weft.api.common.v1 import agent_behaviour_pb2
from weft.api.registry.v1 import agent_pb2, tags_pb2
from weft.dispatch.declared_presets import check_preset, preset_of
from weft.documents.selectors import require_labels
from weft.kernel.schemas.field_rules import check_message


def published_agents(section: RunnerSettings) -> tuple[agent_pb2.AgentManifest, ...]:
    """Returns the agents of a runner. Raises INVALID_ARGUMENT naming the invalid field."""
    return tuple(_agent(agent, f"runners.{section.name}.agents[{index}]") for index, agent in enumerate(section.agents))


def _agent(agent: AgentSettings, where: str) -> agent_pb2.AgentManifest:
    manifest = agent_pb2.AgentManifest(
        name=agent.name,
        description=agent.description,
        system_prompt=agent.system_prompt,
        **preset_of(agent, f"{where}."),
        behaviour=_behaviour(agent, where),
    )
    check_preset(manifest, f"{where}.")
    tags = tags_of(agent, where)
    if tags.ByteSize():
        manifest.tags.CopyFrom(tags)
    if agent.pool is not None:
        manifest.pool = agent.pool
    else:
        manifest.model = agent.model or ""
    return manifest


def tags_of(settings: AgentSettings | ModelSettings, where: str) -> tags_pb2.Tags:
    """Returns the tier, labels and owner of a model or agent; empty if it has none. Raises INVALID_ARGUMENT."""
    tags = tags_pb2.Tags(tier=settings.tier or "", labels=settings.labels, owner=settings.owner or "")
    require_labels(tags, f"{where}.labels")
    return tags


def _behaviour(agent: AgentSettings, where: str) -> agent_behaviour_pb2.AgentBehaviour | None:
    behaviour = agent_behaviour_pb2.AgentBehaviour(
        platform_prompt=agent.platform_prompt,
        tools=agent.tools,
        max_tool_iterations=agent.max_tool_iterations,
        signals=agent.signals,
    )
    if agent.repetition is not None:
        word = f"REPETITION_POLICY_{agent.repetition.upper()}"
        behaviour.repetition_policy = agent_behaviour_pb2.RepetitionPolicy.Value(word)
    # Unset means on, on the wire as in the file.
    if not agent.stop_on_decision_request:
        behaviour.stop_on_decision_request = False
    if not agent.parse_text_tool_calls:
        behaviour.parse_text_tool_calls = False
    check_message(behaviour, where)
    return behaviour if behaviour.ListFields() else None
