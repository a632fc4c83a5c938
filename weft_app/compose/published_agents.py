"""Converts the configured agents of a runner to published manifests."""

import math
from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format

from runner_svc.runner_settings import AgentSettings, RunnerSettings
from runner_svc.runtimes.runtime_settings import ModelSettings
from weft.api.common.v1 import agent_behaviour_pb2, sampling_pb2
from weft.api.registry.v1 import agent_pb2, tags_pb2
from weft.documents.selectors import require_labels
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.schemas.field_rules import check_message


def published_agents(section: RunnerSettings) -> tuple[agent_pb2.AgentManifest, ...]:
    """Returns the agents of a runner. Raises INVALID_ARGUMENT naming the invalid field."""
    return tuple(_agent(agent, f"runners.{section.name}.agents[{index}]") for index, agent in enumerate(section.agents))


def _agent(agent: AgentSettings, where: str) -> agent_pb2.AgentManifest:
    manifest = agent_pb2.AgentManifest(
        name=agent.name,
        description=agent.description,
        system_prompt=agent.system_prompt,
        default_params=sampling_of(agent.default_params, f"{where}.default_params"),
        behaviour=_behaviour(agent, where),
    )
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


def sampling_of(params: Mapping[str, Any], where: str) -> sampling_pb2.SamplingParams:
    """Returns an agent's or model's sampling parameters. Raises INVALID_ARGUMENT naming the field."""
    sampling = sampling_pb2.SamplingParams()
    # Parsed one by one because the parser's message does not name the invalid parameter.
    for name, value in params.items():
        field = f"{where}.{name}"
        if name not in sampling.DESCRIPTOR.fields_by_name and name not in sampling.DESCRIPTOR.fields_by_camelcase_name:
            raise invalid_field(field, f"is no parameter; known are {', '.join(sampling.DESCRIPTOR.fields_by_name)}")
        if isinstance(value, bool):
            raise invalid_field(field, "must be a number, not true or false")
        try:
            json_format.ParseDict({name: value}, sampling)
        except json_format.ParseError:
            raise invalid_field(field, "has a value of the wrong type or out of range") from None
    for descriptor, value in sampling.ListFields():
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid_field(f"{where}.{descriptor.name}", "must be a finite number")
    if not all(math.isfinite(bias) for bias in sampling.logit_bias.values()):
        raise invalid_field(f"{where}.logit_bias", "must hold finite numbers")
    return sampling
