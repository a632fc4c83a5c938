"""What agents ask the mesh for, to and from the wire."""

from registry_svc.mesh.behaviour import NO_BEHAVIOUR, AgentBehaviour, Repetition
from weft.api.common.v1 import agent_behaviour_pb2
from weft.dispatch.parameter_checks import check_behaviour

_POLICIES: dict[Repetition, agent_behaviour_pb2.RepetitionPolicy.ValueType] = {
    Repetition.OFF: agent_behaviour_pb2.REPETITION_POLICY_OFF,
    Repetition.WARN: agent_behaviour_pb2.REPETITION_POLICY_WARN,
    Repetition.KILL: agent_behaviour_pb2.REPETITION_POLICY_KILL,
}
_REPETITIONS: dict[int, Repetition] = {number: repetition for repetition, number in _POLICIES.items()}


def to_behaviour(message: agent_behaviour_pb2.AgentBehaviour, field: str) -> AgentBehaviour:
    """A valid behaviour, where absent and default are one; raises INVALID_ARGUMENT naming the part below `field`."""
    check_behaviour(message, field)
    return AgentBehaviour(
        platform_prompt=message.platform_prompt,
        tools=tuple(message.tools),
        max_tool_iterations=message.max_tool_iterations if message.HasField("max_tool_iterations") else None,
        signals=tuple(message.signals),
        stop_on_decision_request=message.stop_on_decision_request or not message.HasField("stop_on_decision_request"),
        repetition=_REPETITIONS.get(message.repetition_policy),
        parse_text_tool_calls=message.parse_text_tool_calls or not message.HasField("parse_text_tool_calls"),
    )


def behaviour_message(behaviour: AgentBehaviour) -> agent_behaviour_pb2.AgentBehaviour | None:
    """A behaviour on the wire, without what is as it would be anyway; None for none at all."""
    if behaviour == NO_BEHAVIOUR:
        return None
    message = agent_behaviour_pb2.AgentBehaviour(
        platform_prompt=behaviour.platform_prompt,
        tools=behaviour.tools,
        max_tool_iterations=behaviour.max_tool_iterations,
        signals=behaviour.signals,
    )
    if not behaviour.stop_on_decision_request:
        message.stop_on_decision_request = False
    if behaviour.repetition is not None:
        message.repetition_policy = _POLICIES[behaviour.repetition]
    if not behaviour.parse_text_tool_calls:
        message.parse_text_tool_calls = False
    return message
