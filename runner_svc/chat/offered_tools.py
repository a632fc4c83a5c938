"""The functions offered to a chat's model: the caller's, the mesh's tools, and control signals."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from runner_svc.chat.chat_settings import ChatSettings
from runner_svc.policy.signals import SignalSettings, pick_signals
from runner_svc.tools.port import ToolDescription
from runner_svc.tools.tool_box import ToolBox
from weft.api.common.v1 import agent_behaviour_pb2, chat_pb2, json_value_pb2
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.schemas.field_rules import check_message
from weft.kernel.text.json_objects import to_json_object

MAX_NAME_CHARS = 64
"""Maximum length of a function's name in an error."""


class CallKind(Enum):
    """Who handles a call."""

    CALLER = "caller"
    MESH = "mesh"
    SIGNAL = "signal"
    """The call is a message; nothing is run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The functions of one chat, by the unique wire names that the model uses."""

    tools: Mapping[str, ToolDescription]
    """Mesh tools by wire name."""
    signals: Mapping[str, SignalSettings]
    caller: frozenset[str]
    iterations: int
    """Maximum number of tool rounds."""

    @property
    def is_plain(self) -> bool:
        """Whether the mesh adds no function."""
        return not self.tools and not self.signals

    def kind_of(self, name: str, *, with_tools: bool) -> CallKind:
        """Returns who handles a call. Raises TOOL_CALL_INVALID for a function that is not offered now.

        `with_tools`: whether mesh tools are offered now. An unknown name goes to the caller if it has tools.
        """
        if name in self.signals:
            return CallKind.SIGNAL
        if name in self.tools and with_tools:
            return CallKind.MESH
        if name in self.tools or not self.caller:
            raise WeftError(
                Reason.TOOL_CALL_INVALID, f"the model called {name[:MAX_NAME_CHARS]}, which is not offered to it now"
            )
        return CallKind.CALLER

    def names(self, *, with_tools: bool) -> frozenset[str]:
        """Returns the functions that may be called now."""
        return self.caller | self.signals.keys() | (self.tools.keys() if with_tools else frozenset())

    def functions(self, *, with_tools: bool) -> list[chat_pb2.Tool]:
        """Returns the mesh's functions as offered to the model, always in the same order."""
        described = [(signal.name, signal.description, signal.parameters) for signal in self.signals.values()]
        if with_tools:
            described += [(name, tool.description, tool.parameters) for name, tool in self.tools.items()]
        return [
            chat_pb2.Tool(
                function=chat_pb2.FunctionTool(
                    name=name, description=text, parameters=json_object(parameters, MAX_SCHEMA_DEPTH)
                )
            )
            for name, text, parameters in described
        ]


def make_offer(
    payload: chat_pb2.ChatPayload,
    behaviour: agent_behaviour_pb2.AgentBehaviour,
    settings: ChatSettings,
    box: ToolBox,
) -> Offer:
    """Builds the offer of a chat.

    Raises INVALID_ARGUMENT naming the field, TOOL_UNAVAILABLE for a tool or signal that this runner does not have.
    """
    if behaviour.ByteSize():
        check_message(behaviour, "behaviour")
    elif not (settings.tools or payload.tools):
        return Offer(tools={}, signals={}, caller=frozenset(), iterations=settings.max_tool_iterations)
    caller = [tool.function.name for tool in payload.tools]
    iterations = settings.max_tool_iterations
    if behaviour.HasField("max_tool_iterations"):
        iterations = behaviour.max_tool_iterations
    signals = pick_signals(settings.signals, behaviour.signals) if behaviour.signals else ()
    names = [*settings.tools, *behaviour.tools]
    if payload.tool_choice.mode == chat_pb2.ToolChoice.MODE_NONE:
        signals, names = (), []
    tools = box.pick(names, {signal.name for signal in signals}) if names and iterations else ()
    offer = Offer(
        tools={tool.wire_name: tool for tool in tools},
        signals={signal.name: signal for signal in signals},
        caller=frozenset(caller),
        iterations=iterations,
    )
    if not offer.is_plain:
        _require_usable(offer, caller, payload)
    return offer


def require_local(offer: Offer, box: ToolBox) -> None:
    """Raises PERMISSION_DENIED naming the first tool that would send data to a remote provider."""
    for tool in offer.tools.values():
        if box.is_remote(tool.name):
            raise WeftError(
                Reason.PERMISSION_DENIED,
                f"the tool {tool.name} is remote; the request does not allow that (allow_remote)",
                metadata={"tool": tool.name},
            )


def _require_usable(offer: Offer, caller: list[str], payload: chat_pb2.ChatPayload) -> None:
    if payload.HasField("choice_count") and payload.choice_count > 1:
        raise invalid_field("choice_count", "must be 1 if the mesh runs tools or handles signals")
    for index, name in enumerate(caller):
        if name in offer.tools or name in offer.signals:
            raise invalid_field(f"tools[{index}].function.name", f"{name} is already a tool or signal of the mesh")
    try:
        offer.functions(with_tools=True)
    except ValueError as error:
        raise WeftError(Reason.TOOL_UNAVAILABLE, f"the schema of a tool or signal cannot be used: {error}") from None


MAX_SENT_DEPTH = 28
"""Maximum nesting of objects in messages: protobuf reads 100 levels, and an object takes three."""
MAX_SCHEMA_DEPTH = 128
"""Maximum nesting of schemas, which stay in this process."""
_MESSAGES_PER_OBJECT = 3


def json_object(value: Mapping[str, Any], max_depth: int = MAX_SENT_DEPTH) -> json_value_pb2.JsonObject:
    """Converts a JSON object to a message. Raises ValueError if it is nested too deeply or has too large a number."""
    try:
        return to_json_object(value, "it", max_depth * _MESSAGES_PER_OBJECT)
    except FieldError as error:
        raise ValueError(error.message.replace("it: ", "it ", 1)) from None
