"""What a model's chats are like where an agent says nothing. The host builds it from the configuration file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import tzinfo
from enum import IntEnum
from typing import Literal

from runner_svc.policy.repetition import RepetitionLimits
from runner_svc.policy.signals import SignalDescription, signal_catalogue


class RepetitionPolicy(IntEnum):
    """Numbers as in `common.v1.RepetitionPolicy`, whose comments define them."""

    OFF = 1
    WARN = 2
    KILL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """Of one model."""

    system_messages: Literal["joined", "separate"] = "joined"
    """How several system prompts reach the model: as one message, or one each."""
    tools: tuple[str, ...] = ()
    """Tools that the mesh runs for every chat."""
    repetition: RepetitionPolicy = RepetitionPolicy.KILL
    repetition_limits: RepetitionLimits = field(default_factory=RepetitionLimits)
    default_max_tokens: int | None = None
    """Of an answer where neither the request nor its agent names a maximum; None: until the context ends."""
    signals: Mapping[str, SignalDescription] = field(default_factory=signal_catalogue, repr=False)
    """Every signal that an agent may list, by name. Only ever read."""
    max_tool_iterations: int = 8
    """How often the model may be asked again with results of tools."""
    max_tool_calls_per_turn: int = 16
    """Calls that one turn may hold."""
    zone: tzinfo | None = None
    """Of the date and time in the platform prompt; None: the machine's."""
    platform_context: str = ""
    """What the platform prompt says about the mesh."""
