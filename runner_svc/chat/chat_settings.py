"""A model's default chat settings, which an agent can override."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import tzinfo
from typing import TYPE_CHECKING, Literal

from runner_svc.policy.signals import SignalSettings, signal_catalogue

if TYPE_CHECKING:
    from weft.api.common.v1 import sampling_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """Chat settings of one model."""

    tools: tuple[str, ...] = ()
    """Tools that are offered in every chat."""
    repetition: Literal["off", "warn", "kill"] = "kill"
    """What happens to a repetitive answer unless the agent specifies it."""
    tool_call_repair: bool = True
    """Whether tool calls with invalid arguments are repaired or made again."""
    default_max_tokens: int | None = None
    """Maximum answer length if neither the request nor its agent sets one; None: the rest of the context."""
    default_params: "sampling_pb2.SamplingParams | None" = None
    """Sampling parameters that neither the request nor its agent sets; None: the engine's defaults."""
    signals: Mapping[str, SignalSettings] = field(default_factory=signal_catalogue, repr=False)
    """Signals that an agent may list, by name. Read-only."""
    max_tool_iterations: int = 8
    """Maximum number of further turns with tool results."""
    max_tool_calls_per_turn: int = 16
    zone: tzinfo | None = None
    """Time zone of the platform prompt; None: the machine's."""
    platform_prompt: bool = False
    """Whether every chat starts with the platform prompt, even if its agent does not request it."""
    platform_context: str = ""
    """The operator's text about the mesh in the platform prompt."""
