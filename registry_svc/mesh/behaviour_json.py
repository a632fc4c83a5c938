"""What agents ask the mesh for, to and from the JSON that is kept of it.

    {"tools": ["files.read"], "signals": ["NEEDS_EXTERNAL_INFO"], "repetition": "kill", "max_tool_iterations": 4}

Only what differs from its default is there. There is no version: keys that are not known are passed over, so that a
registry reads what an older or a newer one wrote.
"""

import json
from dataclasses import asdict
from typing import Any

from registry_svc.mesh.behaviour import NO_BEHAVIOUR, AgentBehaviour, Repetition

_MAX_INT32 = 2**31 - 1
"""What the wire has room for."""


def behaviour_to_json(behaviour: AgentBehaviour) -> str | None:
    """A behaviour as JSON with sorted keys, so that equal ones are equal texts; None for none at all."""
    if behaviour == NO_BEHAVIOUR:
        return None
    values = asdict(behaviour)
    given = {name: value for name, value in values.items() if value != getattr(NO_BEHAVIOUR, name)}
    if behaviour.repetition is not None:
        given["repetition"] = behaviour.repetition.value
    return json.dumps(given, sort_keys=True)


def behaviour_from_json(text: str | None) -> AgentBehaviour:
    """The behaviour in `text`. Raises ValueError when it is no such document."""
    if text is None:
        return NO_BEHAVIOUR
    try:
        document = json.loads(text)
        return AgentBehaviour(
            platform_prompt=bool(document.get("platform_prompt", False)),
            tools=_names(document.get("tools", [])),
            max_tool_iterations=_count(document.get("max_tool_iterations")),
            signals=_names(document.get("signals", [])),
            stop_on_decision_request=bool(document.get("stop_on_decision_request", True)),
            repetition=_repetition(document.get("repetition")),
            parse_text_tool_calls=bool(document.get("parse_text_tool_calls", True)),
        )
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ValueError("not an agent's behaviour") from None


def _count(value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value <= _MAX_INT32:
        raise TypeError
    return value


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError
    return tuple(str(name) for name in value)


def _repetition(word: Any) -> Repetition | None:
    """A word of a newer release leaves it to the model."""
    return Repetition(word) if word in {each.value for each in Repetition} else None
