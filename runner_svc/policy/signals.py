"""Control signals: one-way messages from a model to its operator or program. Pure.

A signal is offered as a function, and a call of it is the message. The model gets no answer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import MaxLen, MinLen

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.settings.setting_annotations import PUBLIC, Pattern
from weft.kernel.values.reach import PLAIN

MAX_SIGNAL_TEXT_CHARS = 2000
"""Maximum length of a text argument of a built-in signal."""
MAX_OPTIONS = 16
"""Maximum number of options in a requested decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalSettings:
    """A custom control signal, in addition to the built-in ones."""

    name: Annotated[str, Pattern(r"^[A-Z][A-Z0-9_]{0,63}$"), PLAIN, PUBLIC]
    """Name of the signal in capitals, such as `NEEDS_LEGAL_REVIEW`."""
    description: Annotated[str, MinLen(1), MaxLen(1024), PLAIN, PUBLIC]
    """When the model should raise the signal; the model reads this text."""
    parameters: Annotated[Mapping[str, Any], MaxLen(16), PLAIN] = field(default_factory=dict)
    """JSON schema of the signal's arguments. Default: one string, `reason`."""
    asks_for_decision: bool = False
    """Whether the signal asks for a decision, which ends the answers of agents that have `stop_on_decision_request`."""


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description, "minLength": 1, "maxLength": MAX_SIGNAL_TEXT_CHARS}


def _object(required: Iterable[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def reason_only() -> dict[str, Any]:
    """Returns the default argument schema of a signal: a reason as text."""
    return _object(["reason"], reason=_text("Why, in one or two sentences."))


BUILT_IN_SIGNALS: tuple[SignalSettings, ...] = (
    SignalSettings(
        name="LOW_CONFIDENCE",
        description="Raise this when your answer may well be wrong. Then go on and answer as well as you can.",
        parameters=_object(
            ["reason"],
            reason=_text("What you are unsure of, and why."),
            confidence={"type": "number", "description": "From 0 (a guess) to 1.", "minimum": 0, "maximum": 1},
        ),
    ),
    SignalSettings(
        name="NEEDS_EXTERNAL_INFO",
        description="Raise this when you lack information that you cannot get yourself. Then answer what you can.",
        parameters=_object(
            ["reason", "needed"],
            reason=_text("Why the answer depends on it."),
            needed=_text("What is missing, precisely enough for somebody to fetch it."),
        ),
    ),
    SignalSettings(
        name="NEEDS_HIGHER_REASONER",
        description="Raise this when the task is beyond you and a stronger model should take it over.",
        parameters=_object(["reason"], reason=_text("What makes it too hard.")),
    ),
    SignalSettings(
        name="NEEDS_MANAGER_DECISION",
        description="Raise this when you cannot go on before somebody in charge has chosen between options.",
        parameters=_object(
            ["question", "options"],
            question=_text("What has to be decided."),
            options={
                "type": "array",
                "description": "The choices, each in one sentence.",
                "items": _text("One choice."),
                "minItems": 2,
                "maxItems": MAX_OPTIONS,
            },
            recommendation=_text("The option that you would take, and why."),
        ),
        asks_for_decision=True,
    ),
    SignalSettings(
        name="POLICY_RISK",
        description="Raise this when doing what is asked may break a law, a policy or somebody's trust.",
        parameters=_object(["reason"], reason=_text("What the risk is.")),
    ),
)
"""The built-in signals, which every agent may list."""


def signal_catalogue(configured: Iterable[SignalSettings] = ()) -> dict[str, SignalSettings]:
    """Returns the built-in and the configured signals; configured ones override built-in ones of the same name."""
    return {signal.name: signal for signal in (*BUILT_IN_SIGNALS, *configured)}


def pick_signals(catalogue: Mapping[str, SignalSettings], names: Iterable[str]) -> tuple[SignalSettings, ...]:
    """Returns the signals of these names, without duplicates. Raises TOOL_UNAVAILABLE for an unknown one.

    That is the agent's fault, not the caller's, and another runner may know the signal.
    """
    wanted = list(dict.fromkeys(names))
    unknown = next((name for name in wanted if name not in catalogue), None)
    if unknown is not None:
        message = f"the runner knows no signal {unknown}; it knows: {', '.join(sorted(catalogue))}"
        raise WeftError(Reason.TOOL_UNAVAILABLE, message, metadata={"signal": unknown})
    return tuple(catalogue[name] for name in wanted)
