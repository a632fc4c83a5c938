"""A route as a document."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from weft.documents.document_base import DocumentPart, Name
from weft.documents.statuses import RouteStatus
from weft.kernel.durations import MAX_DURATION_CHARS, keep_alive_seconds
from weft.kernel.errors import FieldError

MAX_DESCRIPTION_CHARS = 1024
MAX_CANDIDATES = 16
MAX_BUDGET_SECONDS = 86_400.0


def _length(value: object) -> float:
    try:
        return keep_alive_seconds(value, "")
    except FieldError as error:
        raise ValueError(error.message.removeprefix(": ")) from None


def _whole(seconds: float) -> int | float:
    """A number as people write it: 300, not 300.0."""
    return int(seconds) if seconds.is_integer() else seconds


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("must not name one twice")
    return tuple(names)


_KeepAliveText = Annotated[str, Field(max_length=MAX_DURATION_CHARS)]
_Seconds = PlainSerializer(_whole, return_type=int | float, when_used="json")


class RouteDocument(DocumentPart):
    """A ladder of models for one kind of task. Callers ask for it as model "route/<name>"."""

    kind: Literal["route"]
    """What it is."""
    name: Name
    """Unique in the mesh."""
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)] = ""
    """For people."""
    candidates: Annotated[
        tuple[Name, ...], Field(min_length=1, max_length=MAX_CANDIDATES, strict=False), AfterValidator(_distinct)
    ]
    """Models or pools, by name, best first. The first is the primary, the others are fallbacks."""
    budget_seconds: Annotated[float, Field(gt=0, le=MAX_BUDGET_SECONDS), _Seconds] | None = None
    """How long an answer may take from its arrival to its end, waiting and loads included; a request that would take
    longer is refused at once. Absent: as long as the request's own deadline."""
    keep_alive: (
        Annotated[float, BeforeValidator(_length, json_schema_input_type=float | _KeepAliveText), _Seconds] | None
    ) = None
    """How long the model stays loaded after a request by this route: seconds, a text such as "5m", -1 for ever, 0 for
    one request. Absent: as the model is configured."""
    pin_primary: bool = False
    """Whether the primary is waited and loaded for as long as it is there at all, even where a fallback could answer
    sooner."""
    status: RouteStatus | None = None
    """What is true of it now; ignored by `apply`."""
