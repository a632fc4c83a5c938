"""The error for an unknown name: one sentence for all commands and APIs, with similar names."""

from collections.abc import Iterable, Mapping
from heapq import nsmallest
from types import MappingProxyType

from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import MAX_NAME_CHARS, closest_names, did_you_mean

TARGET = "model, pool, agent, route or workflow"
"""What a request can name; all kinds share one namespace."""
MODEL, POOL, AGENT, ROUTE, RUNNER, SECRET = "model", "pool", "agent", "route", "runner", "secret"
WORKFLOW = "workflow"
MODEL_OR_POOL = "model or pool"
RESOURCE = "resource"
"""What `weft get NAME` can name."""
LOGGED = "model, runner or service"
"""What `weft logs NAME` can name."""

UNKNOWN_KIND, UNKNOWN_NAME = "unknown_kind", "unknown_name"
"""Metadata keys with the requested kind and name."""
CLOSE_NAMES, SOME_NAMES = "close_names", "some_names"
"""Metadata keys with comma-separated names: similar ones, or if there are none, the first existing ones."""
FOR_TASKS = " (a task may set wait_for_model for a model that does not exist yet)"
"""End of the sentence for the model of a task, in API terms; the command line has an option instead."""
MAX_SOME_NAMES = 5
"""Maximum number of names listed if none is similar."""

_LISTED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys((MODEL, MODEL_OR_POOL, TARGET), "`weft get models` (GET /v1/models)"),
        RESOURCE: "`weft get all`",
        LOGGED: "`weft get all`",
        SECRET: "`weft get secrets` (GET /v1/admin/secrets)",
    }
)
_PREFIXED_KINDS = (AGENT, ROUTE, WORKFLOW)
"""Kinds with a prefix in the `model` of a request, as in `agent/NAME`."""


def unknown_name(kind: str, name: str, names: Iterable[str] = (), *, field: str = "") -> WeftError:
    """Returns the error for an unknown name; `names` are those that the caller may see.

    The reason is MODEL_NOT_FOUND for what requests can name, NOT_FOUND for other kinds. `field` is the request field,
    if any. A name without printable characters is not shown.
    """
    details = _details(kind, name, names)
    reason = Reason.MODEL_NOT_FOUND if kind in (MODEL, MODEL_OR_POOL, TARGET) else Reason.NOT_FOUND
    return WeftError(reason, _sentence(details), metadata=details | ({"field": field} if field else {}))


def unknown_target(target: str, names: Iterable[str] = (), *, field: str = "model") -> WeftError:
    """Returns the MODEL_NOT_FOUND error for the `model` of a request; see `unknown_name`.

    After a prefix such as `agent/`, only names of that kind are suggested. `names` have these prefixes too.
    """
    kind, name = kind_and_name(target)
    error = unknown_name(kind, name, field=field)
    error.reason = Reason.MODEL_NOT_FOUND
    return among(error, of_the_kind(error, names))


def unknown_field_target(target: str, names: Iterable[str], field: str, note: str = "") -> FieldError:
    """Returns `unknown_target` as the error of a field such as `lines[3].spec.model`, with `note` appended."""
    found = unknown_target(target, names)
    error = FieldError(field, f"{found.message}{note}", found.reason)
    error.metadata = found.metadata | {"field": field}
    return error


def kind_and_name(target: str) -> tuple[str, str]:
    """Returns the kind and the bare name in the `model` of a request; the kind is TARGET without a prefix."""
    for kind in _PREFIXED_KINDS:
        if target.startswith(f"{kind}/"):
            return kind, target.removeprefix(f"{kind}/")
    return TARGET, target


def among(error: WeftError, names: Iterable[str]) -> WeftError:
    """Makes an unknown-name error suggest the closest of `names`; returns other errors unchanged.

    For an edge that knows which names its caller may see.
    """
    name = error.metadata.get(UNKNOWN_NAME)
    if name is None:
        return error
    details = _details(error.metadata.get(UNKNOWN_KIND, TARGET), name, names)
    error.message = error.message.replace(_sentence(error.metadata), _sentence(details))
    for key in (CLOSE_NAMES, SOME_NAMES):
        error.metadata.pop(key, None)
    error.metadata |= details
    return error


def of_the_kind(error: WeftError, targets: Iterable[str]) -> Iterable[str]:
    """Returns the request targets of an error's kind: only agents for an unknown agent."""
    kind = error.metadata.get(UNKNOWN_KIND, TARGET)
    return (each for each in targets if each.startswith(f"{kind}/")) if kind in _PREFIXED_KINDS else targets


def close_names_of(error: WeftError) -> tuple[str, ...]:
    """Returns the similar names in an error; empty if there are none."""
    listed = error.metadata.get(CLOSE_NAMES, "")
    return tuple(listed.split(",")) if listed else ()


def _details(kind: str, name: str, names: Iterable[str]) -> dict[str, str]:
    """Returns the metadata from which the sentence is made."""
    known = list(names)
    details = {UNKNOWN_KIND: kind, UNKNOWN_NAME: _shown(name)}
    close = closest_names(name, known)
    if close:
        return details | {CLOSE_NAMES: ",".join(close)}
    some = nsmallest(MAX_SOME_NAMES, known)
    return details | ({SOME_NAMES: ",".join(some)} if some else {})


def _sentence(details: Mapping[str, str]) -> str:
    kind = details.get(UNKNOWN_KIND, TARGET)
    return f"there is no {kind} {details.get(UNKNOWN_NAME) or 'of this name'}; {_hint(kind, details)}"


def _hint(kind: str, details: Mapping[str, str]) -> str:
    if details.get(CLOSE_NAMES):
        return did_you_mean(details[CLOSE_NAMES].split(","))
    plural = f"{kind}es" if kind.endswith("s") else f"{kind}s"
    lists = _LISTED.get(kind) or f"`weft get {plural}` (GET /api/v1/{plural})"
    some = details.get(SOME_NAMES, "").split(",")
    if not some[0]:
        return f"{lists} lists what there is"
    more = f", and those that {lists} lists" if len(some) == MAX_SOME_NAMES else ""
    return f"there {'is' if len(some) == 1 else 'are'} {', '.join(some)}{more}"


def _shown(name: str) -> str:
    return "".join(filter(str.isprintable, name[:MAX_NAME_CHARS]))
