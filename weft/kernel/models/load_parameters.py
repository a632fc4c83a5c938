"""Load parameters of models, and their validation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeAlias, get_type_hints

from weft.api.runner.v1 import load_pb2 as pb
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.values.reach import VARIABLE, Reach, Reaches

LoadParameter: TypeAlias = pb.LoadParameter
LoadValue = int | float | str | bool
MAX_PARAMETERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerParameters:
    """The parameters of a load that attaches a server, the only ones whose texts are not words of a list."""

    api_key_env: Annotated[str, VARIABLE] = ""
    """Environment variable of the runner with the server's API key."""
    remote: bool = False
    """Whether the server is a remote provider."""


API_KEY_ENV, REMOTE = "api_key_env", "remote"


def parameter_reach(name: str) -> Reach:
    """Returns what a parameter's text makes a runner open, read or run.

    Texts of other parameters are words of the runner's own list, see `check_parameters`.
    """
    return _parameter_reaches().get(name, Reach.NONE)


@cache
def _parameter_reaches() -> Mapping[str, Reach]:
    hints = get_type_hints(ServerParameters, include_extras=True)
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: mark.reach for name, found in marks.items() for mark in found if isinstance(mark, Reaches)}


def load_parameter(name: str, description: str, *, default: LoadValue | None = None, **allowed: Any) -> LoadParameter:
    """Returns a parameter; `allowed` are fields of the message. `default`: the configured value."""
    configured = None if default is None else value_message(default)
    return LoadParameter(name=name, description=description, default=configured, **allowed)


def load_value(message: pb.LoadValue) -> LoadValue | None:
    """Returns the value of a message; None: it is unset."""
    kind = message.WhichOneof("kind")
    value: LoadValue | None = None if kind is None else getattr(message, kind)
    return value


def value_message(value: LoadValue) -> pb.LoadValue:
    """Returns a value as a message."""
    if isinstance(value, bool):
        return pb.LoadValue(flag=value)
    if isinstance(value, int):
        return pb.LoadValue(integer=value)
    return pb.LoadValue(number=value) if isinstance(value, float) else pb.LoadValue(word=value)


def check_parameters(
    given: Mapping[str, LoadValue], known: Sequence[LoadParameter], field: str = "parameters"
) -> dict[str, LoadValue]:
    """Returns the validated parameters. Raises INVALID_ARGUMENT naming the parameter and its allowed values."""
    if len(given) > MAX_PARAMETERS:
        raise invalid_field(field, f"must be at most {MAX_PARAMETERS}")
    by_name = {parameter.name: parameter for parameter in known}
    checked: dict[str, LoadValue] = {}
    for name, value in given.items():
        parameter = by_name.get(name)
        if parameter is None:
            names = ", ".join(sorted(by_name)) or "none"
            raise invalid_field(f"{field}.{name[:64]}", f"cannot be set for this model; these can: {names}")
        checked[name] = _checked(value, parameter, f"{field}.{name}")
    return checked


def _checked(value: LoadValue, parameter: LoadParameter, field: str) -> LoadValue:
    if parameter.words:
        if value not in parameter.words:
            raise invalid_field(field, f"must be one of: {', '.join(parameter.words)}")
        return value
    if parameter.flag:
        if not isinstance(value, bool):
            raise invalid_field(field, "must be true or false")
        return value
    if isinstance(value, (bool, str)) or not math.isfinite(value):
        raise invalid_field(field, "must be a number")
    if parameter.integer and value != int(value):
        raise invalid_field(field, "must be a whole number")
    low = parameter.minimum if parameter.HasField("minimum") else None
    high = parameter.maximum if parameter.HasField("maximum") else None
    if (low is not None and value < low) or (high is not None and value > high):
        raise invalid_field(field, f"must be {_range(low, high)}")
    return int(value) if parameter.integer else value


def _range(low: float | None, high: float | None) -> str:
    # 15 digits show whole numbers in full.
    if low is None:
        return f"at most {high:.15g}"
    return f"at least {low:.15g}" if high is None else f"from {low:.15g} to {high:.15g}"
