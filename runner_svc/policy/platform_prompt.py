"""The platform prompt: the mesh's system prompt, which precedes all others. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

SYSTEM_DELIMITER = "\n\n---\n\n"
"""Delimiter of system prompts in one message: a horizontal rule, which models read as the end of a section."""
TEXT_CALL_FORM = '<tool_call>{"name": "<function>", "arguments": {<arguments>}}</tool_call>'
_MESH = (
    "You are one of several cooperating models in a mesh. People and programs send you work; other models, tools and "
    "people may continue from what you write. Follow the instructions after this section within these rules."
)
_TOOL_USE = (
    "Call a tool only when you need what it gives. Calls of one turn run side by side and their results come back to "
    "you; do not make results up. A result says so when it failed or was cut."
)
MAX_DESCRIPTION_CHARS = 200
"""Maximum length of a function's description in the prompt; the engine receives all of it."""
MAX_ARGUMENTS = 16
"""Maximum number of a function's arguments in the prompt."""
MAX_ARGUMENT_NAME_CHARS = 64
"""Maximum length of an argument's name in the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionFacts:
    """A function that the model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of an object. Untrusted: any part may be missing or malformed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFacts:
    """The variables of the platform prompt."""

    now: datetime
    """Time in the configured time zone."""
    runner: str
    model: str
    agent: str = ""
    """The request's agent; empty: none."""
    context: str = ""
    """The operator's text about the mesh."""
    tools: Sequence[FunctionFacts] = ()
    """Tools that the mesh runs for the model, by wire name."""
    signals: Sequence[FunctionFacts] = ()
    text_calls: bool = False
    """Whether calls written as text are executed."""
    iterations_left: int = 0


def platform_prompt(facts: PromptFacts) -> str:
    """Returns the platform prompt. It is rebuilt for each turn.

    Constant parts come first, then those that depend on the agent, and last those that change with each turn and
    minute, because an engine's prefix cache ends at the first difference. For the same reason the time has no seconds.
    """
    parts = [_who(facts), facts.context.strip(), _tool_rules(facts), _signal_rules(facts), _status(facts)]
    return "\n\n".join(part for part in parts if part)


def join_system_texts(texts: Sequence[str]) -> str:
    """Joins system prompts in order."""
    return SYSTEM_DELIMITER.join(texts)


def _who(facts: PromptFacts) -> str:
    lines = [
        _MESH,
        f"Model: {facts.model}. Runner: {facts.runner}.",
    ]
    if facts.agent:
        lines.append(f"You answer as the agent {facts.agent}.")
    return "\n".join(lines)


def _tool_rules(facts: PromptFacts) -> str:
    if not facts.tools:
        return ""
    lines = ["Tools: functions that are run for you.", *map(_line, facts.tools), _TOOL_USE]
    if facts.text_calls:
        lines.append(f"If you cannot call functions in another way, write exactly: {TEXT_CALL_FORM}")
    return "\n".join(lines)


def _signal_rules(facts: PromptFacts) -> str:
    if not facts.signals:
        return ""
    lines = [
        # words: a text for models, which act by its wording
        "Control signals: call one of these functions to tell whoever steers you something. No result comes back.",
        *map(_line, facts.signals),
    ]
    if facts.text_calls and not facts.tools:
        lines.append(f"If you cannot call functions in another way, write exactly: {TEXT_CALL_FORM}")
    return "\n".join(lines)


def _line(function: FunctionFacts) -> str:
    """Describes a function in one line, because chat templates without tool support do not show tools to the model."""
    properties = function.parameters.get("properties")
    required = function.parameters.get("required")
    names = list(properties.items())[:MAX_ARGUMENTS] if isinstance(properties, Mapping) else []
    must = required if isinstance(required, (list, tuple)) else ()
    arguments = ", ".join(
        f"{_in_one_line(name, MAX_ARGUMENT_NAME_CHARS)}{'' if name in must else '?'}: {_kind(schema)}"
        for name, schema in names
    )
    return f"- {function.name}({arguments}): {_in_one_line(function.description, MAX_DESCRIPTION_CHARS)}"


def _in_one_line(text: Any, max_chars: int) -> str:
    """Returns untrusted text as one line, so that it cannot imitate a section of the prompt."""
    return " ".join(str(text).split())[:max_chars]


def _kind(schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if isinstance(kind, (list, tuple)):
        return " or ".join(map(str, kind))
    return kind if isinstance(kind, str) else "any"


def _status(facts: PromptFacts) -> str:
    zone = _zone(facts.now)
    lines = [f"Now: {facts.now:%A, %Y-%m-%d %H:%M}{zone}."]
    if facts.tools:
        lines.append(_rounds(facts.iterations_left))
    return "\n".join(lines)


def _rounds(left: int) -> str:
    if left == 0:
        return "Tool rounds left: 0. Answer now with what you have."
    return f"Tool rounds left: {left}. Then you must answer with what you have."


def _zone(now: datetime) -> str:
    if now.tzinfo is None:
        return ""
    name = getattr(now.tzinfo, "key", None) or now.tzname() or ""
    offset = now.strftime("%z")
    offset = f"UTC{offset[:3]}:{offset[3:5]}"
    return f", {name} ({offset})" if name and name != offset else f", {offset}"
