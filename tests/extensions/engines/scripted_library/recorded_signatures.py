"""What the stand-ins take: the arguments of a library, by the signatures that are recorded of it in a JSON file."""

import json
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

KINDS = (
    Parameter.POSITIONAL_ONLY,
    Parameter.POSITIONAL_OR_KEYWORD,
    Parameter.VAR_POSITIONAL,
    Parameter.KEYWORD_ONLY,
    Parameter.VAR_KEYWORD,
)


class Signatures:
    """The recorded signatures of one library."""

    def __init__(self, file: Path) -> None:
        self.record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))

    def signature_of(self, name: str) -> Signature:
        """Returns the recorded signature of a function."""
        parameters = []
        for one, kind, optional in self.record["signatures"][name]:
            has_default = optional and KINDS[kind] not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
            parameters.append(Parameter(one, KINDS[kind], default=None if has_default else Parameter.empty))
        return Signature(parameters)

    def checked(self, name: str, swallowed: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Refuses calls that the library would refuse, and names that it would swallow in its `**kwargs` and not read.

        `swallowed`: names that it does read from there.
        """
        signature = self.signature_of(name)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(function)
            def called(*arguments: Any, **named: Any) -> Any:
                bound = signature.bind(*arguments, **named)
                unread = set(bound.arguments.get("kwargs", {})) - set(swallowed)
                assert not unread, f"{name} does not read {sorted(unread)}"
                return function(*arguments, **named)

            return called

        return decorate
