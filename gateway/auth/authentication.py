"""Authentication of HTTP requests: reads the API key; `weft.kernel.principal` verifies it."""

from typing import Protocol
from urllib.parse import parse_qsl

from starlette.types import Scope

from gateway.auth.access import AccessRules
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.principal import KEY_PREFIX, LOCAL, KeyRing, Principal, authenticate, require_one_key
from weft.kernel.reasons import Reason

_BEARER = "bearer "
_KEY_BEGINNING = f"{KEY_PREFIX}_".encode()
_KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
_NO_KEY = "-"
"""Stands for credentials of another kind; it is no valid key."""


class KeyRingSource(Protocol):
    """The source of valid API keys; see `weft.dispatch.key_ring.KeyRingWatcher`."""

    @property
    def ring(self) -> KeyRing:
        """The keys that are valid now."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether the keys have been loaded."""
        ...


class Gate(Protocol):
    """Admits requests."""

    def admit(self, scope: Scope) -> Principal:
        """Returns the caller.

        Raises UNAUTHENTICATED, PERMISSION_DENIED, MALFORMED_REQUEST for a header that is there twice, and
        SERVICE_UNAVAILABLE before the keys are known.
        """
        ...


class OpenGate:
    """Admits every request as local: for loopback without keys."""

    def admit(self, scope: Scope) -> Principal:  # noqa: ARG002 - whoever it is
        """See Gate.admit."""
        return LOCAL


class KeyGate:
    """Admits requests that have a valid key whose scopes allow the endpoint."""

    def __init__(self, keys: KeyRingSource, rules: AccessRules, clock: Clock) -> None:
        self._keys = keys
        self._rules = rules
        self._clock = clock

    def admit(self, scope: Scope) -> Principal:
        """See Gate.admit."""
        path: str = scope["path"]
        if self._rules.is_open(path):
            return LOCAL
        presented = _presented(scope)
        if presented is not None and not self._keys.is_ready:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the gateway does not know the keys yet", retry_after_seconds=1)
        principal = authenticate(self._keys.ring, presented, self._clock.utc_now())
        access = self._rules.access_of(scope["method"], path)
        if access is not None:
            principal.require(access)
        return principal


def require_once(scope: Scope, names: frozenset[bytes]) -> None:
    """Raises MALFORMED_REQUEST where a header of these names is there twice: a proxy may have read the other one."""
    found = [name for name, _ in scope["headers"] if name in names]
    if len(found) > len(set(found)):
        twice = next(name for name in found if found.count(name) > 1).decode()
        raise WeftError(Reason.MALFORMED_REQUEST, f"the request must not have the header {twice} more than once")


def _presented(scope: Scope) -> str | None:
    """Returns the key of either header; None: there is none. Authorization takes precedence.

    Raises MALFORMED_REQUEST where one of the headers is there twice, UNAUTHENTICATED for two different keys.
    """
    require_once(scope, _KEY_HEADERS)
    headers = dict(scope["headers"])
    shown = []
    given: bytes | None = headers.get(b"authorization")
    if given is not None:
        text = given.decode("latin-1")
        shown.append(text[len(_BEARER) :].strip() if text[: len(_BEARER)].lower() == _BEARER else _NO_KEY)
    given = headers.get(b"x-api-key")
    if given is not None:
        shown.append(given.decode("latin-1"))
    if shown:
        require_one_key([*shown, *_keys_in_query(scope)])
    return shown[0] if shown else None


def _keys_in_query(scope: Scope) -> list[str]:
    """Returns keys in the query, which are never used as credentials; beside one they must be the same key."""
    query: bytes = scope["query_string"]
    return [value for _, value in parse_qsl(query.decode("latin-1"))] if _KEY_BEGINNING in query else []
