"""Values of options and arguments that need no conversion by pydantic, whose import takes longer than most commands."""

import os
from enum import Enum
from pathlib import Path
from typing import Any

from typer.models import ParameterInfo

_UNKNOWN = object()
_SCALARS = (str, bool, int, float)


def without_conversion(command: Any) -> None:
    """Makes a command take plain values as they are; all others, and all that is refused, go typer's own way."""
    typers_own = command.get_params

    def get_params(context: Any) -> Any:
        found = typers_own(context)
        for parameter in found:
            # Releases of typer without pydantic have no such method, and need none of this.
            known = getattr(parameter, "get_runtime_param", None)
            if known is not None and not isinstance(known, _PlainParameter):
                parameter.get_runtime_param = _PlainParameter(known)
        return found

    # Not in `params` alone: the option --help is made when it is asked for.
    command.get_params = get_params


class _PlainParameter:
    """What typer asks to convert the value of one parameter."""

    def __init__(self, typers_own: Any) -> None:
        self._typers_own = typers_own

    def __call__(self) -> "_PlainParameter":
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """Returns the value in its type. Raises what typer raises for a wrong one."""
        plain = _plain(value, param)
        return self._typers_own().coerce(value, param=param, ctx=ctx) if plain is _UNKNOWN else plain


def _plain(value: Any, param: Any) -> Any:
    kind, info = param.type_descriptor.annotation, param.type_descriptor.parameter_info
    is_many = param.multiple or param.nargs == -1
    if value is None:
        return () if is_many else None
    if info.parser is not None or getattr(info, "click_type", None) is not None:
        return _UNKNOWN
    if kind == list[str] and is_many and isinstance(value, list | tuple):
        return list(value) if all(type(each) is str for each in value) else _UNKNOWN
    return _UNKNOWN if is_many or not isinstance(kind, type) else _plain_one(value, kind, info)


def _plain_one(value: Any, kind: type, info: ParameterInfo) -> Any:
    if issubclass(kind, Enum):
        return next((each for each in kind if value in (each, each.value)), _UNKNOWN)
    if kind is Path:
        return Path(value) if _is_usual_path(value, info) else _UNKNOWN
    return value if kind in _SCALARS and type(value) is kind and _is_within(value, info) else _UNKNOWN


def _is_within(value: Any, info: ParameterInfo) -> bool:
    """Whether a number, such as a default, is within the bounds of its option."""
    return (info.min is None or value >= info.min) and (info.max is None or value <= info.max)


def _is_usual_path(value: Any, info: ParameterInfo) -> bool:
    """Whether typer would check nothing of a path that is not met."""
    is_checked = info.exists or info.writable or info.resolve_path or info.allow_dash or info.path_type is not None
    is_any = info.file_okay and info.dir_okay
    return not is_checked and is_any and (not os.path.lexists(value) or os.access(value, os.R_OK))
