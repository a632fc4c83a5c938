"""Strict query parameters: unknown, repeated and invalid ones are refused by name."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.types import Scope

from gateway.intake.headers import require_local_caller, tenant_of
from gateway.intake.request_model import MAX_ID_CHARS
from gateway.request_facts import facts_of
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import require_token

MAX_PARAMETERS = 16
MAX_VALUE_CHARS = 1024
_SHOWN_CHARS = 64
_MAX_DIGITS = 9
"""Maximum digits of a number with leading zeros, unless the maximum value has more."""
_FLAGS = {"1": True, "true": True, "0": False, "false": False}


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Names the field of the request in an error about something that it refers to and that does not exist."""
    try:
        yield
    except WeftError as error:
        if error.reason is not Reason.NOT_FOUND or error.metadata.get("field"):
            raise
        raise FieldError(field, error.message, Reason.NOT_FOUND) from None


class Query:
    """The query parameters of one request; `known` are those of the endpoint."""

    def __init__(self, scope: Scope, known: frozenset[str] | None = frozenset()) -> None:
        """`known`: None: unknown parameters are ignored, and the last of repeated ones is used.

        Raises MALFORMED_REQUEST or INVALID_ARGUMENT naming the invalid parameter.
        """
        parameters = _parse(scope["query_string"])
        if known is not None:
            _require_known(parameters, known)
        self._values = dict(parameters)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str) -> str:
        """Returns the value; empty: not given."""
        return self._values.get(name, "")

    def token(self, name: str) -> str:
        """Returns the value as an id; empty: not given. Raises INVALID_ARGUMENT naming the parameter."""
        return require_token(self._values[name], name, MAX_ID_CHARS) if name in self._values else ""

    def is_ascending(self) -> bool:
        """Whether `order` is `asc`; by default a list begins with the newest."""
        order = self._values.get("order", "desc")
        if order not in {"asc", "desc"}:
            raise invalid_field("order", "must be 'asc' or 'desc'")
        return order == "asc"

    def count(self, name: str, most: int, *, least: int = 1, padded: bool = True) -> int:
        """Returns a whole number as `whole_number` does; 0: not given."""
        if name not in self._values:
            return 0
        return whole_number(self._values[name], name, most, least=least, padded=padded)

    def flag(self, name: str) -> bool:
        """Returns a boolean; False: not given."""
        if name not in self._values:
            return False
        flag = _FLAGS.get(self._values[name])
        if flag is None:
            raise invalid_field(name, "must be 1, true, 0 or false")
        return flag


def whole_number(text: str, field: str, most: int, *, least: int = 0, padded: bool = True) -> int:
    """Returns a whole number from `least` to `most`. Raises INVALID_ARGUMENT naming `field` for anything else.

    `padded`: whether leading zeros may make it longer than the maximum.
    """
    max_digits = max(_MAX_DIGITS if padded else 0, len(str(most)))
    is_number = text.isascii() and text.isdigit() and len(text) <= max_digits
    if not is_number or not least <= int(text) <= most:
        raise invalid_field(field, f"must be a whole number from {least} to {most}")
    return int(text)


def begin_read(request: Request, api: str, known: Iterable[str] = ()) -> Query:
    """Records the API in the request's facts; returns the query. Raises as `Query`."""
    facts_of(request.scope).surface = api
    return Query(request.scope, frozenset(known))


def begin_change(request: Request, api: str, known: Iterable[str] = ()) -> Query:
    """As `begin_read`, for a request that changes something. Raises PERMISSION_DENIED for a foreign web page."""
    facts_of(request.scope).surface = api
    require_local_caller(request.scope)
    return Query(request.scope, frozenset(known))


def begin_owned(request: Request, api: str, name: str) -> tuple[str, str]:
    """Records the API in the request's facts; returns the caller's tenant and the id in the path parameter `name`."""
    facts_of(request.scope).surface = api
    found = require_token(request.path_params[name], name, MAX_ID_CHARS)
    return tenant_of(request.scope), found


def _parse(raw: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_PARAMETERS)
    except UnicodeDecodeError:
        raise WeftError(Reason.MALFORMED_REQUEST, "the query is not valid UTF-8 in percent-encoding") from None
    except ValueError:
        raise WeftError(Reason.MALFORMED_REQUEST, f"the query has more than {MAX_PARAMETERS} parameters") from None


def _require_known(parameters: Sequence[tuple[str, str]], known: frozenset[str]) -> None:
    seen = set[str]()
    for name, value in parameters:
        if name not in known:
            there_are = ", ".join(sorted(known)) or "none"
            raise invalid_field(name[:_SHOWN_CHARS], f"unknown query parameter; known ones: {there_are}")
        if name in seen:
            raise invalid_field(name, "is given twice")
        if len(value) > MAX_VALUE_CHARS:
            raise invalid_field(name, f"is longer than {MAX_VALUE_CHARS} characters")
        if "\0" in value:
            raise invalid_field(name, "contains a NUL, which no name has")
        seen.add(name)
