"""Chat settings of a model, which hold where an agent sets nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import tzinfo
from typing import TYPE_CHECKING, Literal

from runner_svc.policy.signals import SignalDescription, signal_catalogue

if TYPE_CHECKING:
    from weft.api.common.v1 import sampling_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """Chat settings of one model."""

    tools: tuple[str, ...] = ()
    """Tools that are offered in every chat."""
    repetition: Literal["off", "warn", "kill"] = "kill"
    """What happens to an answer that repeats itself, where its agent does not say."""
    default_max_tokens: int | None = None
    """Maximum of an answer where neither the request nor its agent sets one; None: the rest of the context."""
    default_params: "sampling_pb2.SamplingParams | None" = None
    """Sampling parameters of requests that leave them out, also in their agent; None: the engine's own."""
    signals: Mapping[str, SignalDescription] = field(default_factory=signal_catalogue, repr=False)
    """Signals that an agent may list, by name. Read-only."""
    max_tool_iterations: int = 8
    """Maximum number of further turns with tool results."""
    max_tool_calls_per_turn: int = 16
    """Maximum number of calls in one turn."""
    zone: tzinfo | None = None
    """Time zone of the platform prompt; None: the machine's."""
    platform_prompt: bool = False
    """Whether every chat begins with the platform prompt, also where its agent does not ask for it."""
    platform_context: str = ""
    """The operator's text about the mesh in the platform prompt."""
