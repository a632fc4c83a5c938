"""What the stand-in takes: the arguments of the library, by the recorded signatures."""

import json
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

RECORD: dict[str, Any] = json.loads(Path(__file__).with_name("signatures.json").read_text(encoding="utf-8"))

KINDS = (
    Parameter.POSITIONAL_ONLY,
    Parameter.POSITIONAL_OR_KEYWORD,
    Parameter.VAR_POSITIONAL,
    Parameter.KEYWORD_ONLY,
    Parameter.VAR_KEYWORD,
)


def signature_of(name: str) -> Signature:
    """Returns the recorded signature of a function."""
    parameters = []
    for one, kind, optional in RECORD["signatures"][name]:
        has_default = optional and KINDS[kind] not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        parameters.append(Parameter(one, KINDS[kind], default=None if has_default else Parameter.empty))
    return Signature(parameters)


def checked(name: str, swallowed: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Refuses calls that the library would refuse, and names that it would swallow in its `**kwargs` and not read.

    `swallowed`: names that it does read from there.
    """
    signature = signature_of(name)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(*arguments: Any, **named: Any) -> Any:
            bound = signature.bind(*arguments, **named)
            unread = set(bound.arguments.get("kwargs", {})) - set(swallowed)
            assert not unread, f"{name} does not read {sorted(unread)}"
            return function(*arguments, **named)

        return called

    return decorate
