"""What an agent's document asks the mesh for, to and from the wire."""

from typing import Any

from weft.api.common.v1 import agent_behaviour_pb2
from weft.documents.documents import AgentDocument

_POLICIES: dict[str, agent_behaviour_pb2.RepetitionPolicy.ValueType] = {
    "off": agent_behaviour_pb2.REPETITION_POLICY_OFF,
    "warn": agent_behaviour_pb2.REPETITION_POLICY_WARN,
    "kill": agent_behaviour_pb2.REPETITION_POLICY_KILL,
}
_WORDS: dict[int, str] = {number: word for word, number in _POLICIES.items()}


def behaviour_message(document: AgentDocument) -> agent_behaviour_pb2.AgentBehaviour | None:
    """What `document` asks for, on the wire; None when that is nothing."""
    message = agent_behaviour_pb2.AgentBehaviour(
        platform_prompt=document.platform_prompt,
        tools=document.tools,
        max_tool_iterations=document.max_tool_iterations,
        signals=document.signals,
    )
    if document.repetition is not None:
        message.repetition_policy = _POLICIES[document.repetition]
    if not document.stop_on_decision_request:
        message.stop_on_decision_request = False
    if not document.parse_text_tool_calls:
        message.parse_text_tool_calls = False
    return message if message.ListFields() else None


def behaviour_fields(message: agent_behaviour_pb2.AgentBehaviour) -> dict[str, Any]:
    """What `message` asks for, as fields of an agent's document."""
    return {
        "platform_prompt": message.platform_prompt,
        "tools": tuple(message.tools),
        "max_tool_iterations": message.max_tool_iterations if message.HasField("max_tool_iterations") else None,
        "signals": tuple(message.signals),
        "stop_on_decision_request": message.stop_on_decision_request
        or not message.HasField("stop_on_decision_request"),
        "repetition": _WORDS.get(message.repetition_policy),
        "parse_text_tool_calls": message.parse_text_tool_calls or not message.HasField("parse_text_tool_calls"),
    }
