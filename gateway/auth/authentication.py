"""Authentication of HTTP requests by API key. `gateway.routing.Needs` declares what each route requires."""

from typing import Protocol
from urllib.parse import parse_qsl

from starlette.types import Scope

from gateway.request_facts import headers_of
from weft.kernel.access.principal import (
    KEY_PREFIX,
    LOCAL,
    OTHER_USER,
    Access,
    KeyRing,
    Principal,
    authenticate,
    require_one_key,
)
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock, SystemClock

_BEARER = "bearer "
_KEY_BEGINNING = f"{KEY_PREFIX}_".encode()
_KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
_NO_KEY = "-"
"""Placeholder for an Authorization header of another scheme; never a valid key."""
HOME_SOCKET = "weft.home_socket"
"""Scope key that marks requests over the home's Unix socket, which only its user can reach."""
OWN_USER_KEY = "weft.is_own_user"
"""Key in a scope's state: a function that returns whether the user that runs weft holds the connection's other end."""


class KeyRingSource(Protocol):
    """The source of valid API keys; see `weft_app.compose.key_ring.KeyRingWatcher`."""

    @property
    def ring(self) -> KeyRing:
        """The keys that are valid now."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether the keys have been loaded."""
        ...


class Gate:
    """Authenticates callers by key or by the home's socket; without keys, by the user of the machine."""

    def __init__(
        self, keys: KeyRingSource | None = None, clock: Clock | None = None, *, is_behind_proxy: bool = False
    ) -> None:
        """`keys`: None: callers need none, for loopback. `is_behind_proxy`: a proxy connects for any user."""
        self._keys = keys
        self._is_behind_proxy = is_behind_proxy
        self._clock = clock or SystemClock()

    @property
    def needs_keys(self) -> bool:
        """Whether callers need API keys."""
        return self._keys is not None

    def admit(self, scope: Scope) -> Principal:
        """Returns the caller. Raises UNAUTHENTICATED, and MALFORMED_REQUEST for a repeated header.

        Raises SERVICE_UNAVAILABLE before the keys are loaded.
        """
        if self._keys is None:
            return LOCAL if scope.get(HOME_SOCKET) or self._is_of_own_user(scope) else OTHER_USER
        presented = _presented(scope)
        if presented is None and scope.get(HOME_SOCKET):
            return LOCAL
        if presented is not None and not self._keys.is_ready:
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE, "the gateway has not loaded the API keys yet", retry_after_seconds=1
            )
        return authenticate(self._keys.ring, presented, self._clock.utc_now())

    def _is_of_own_user(self, scope: Scope) -> bool:
        is_own_user = scope.get("state", {}).get(OWN_USER_KEY)
        return not self._is_behind_proxy and is_own_user is not None and is_own_user()

    def identify(self, scope: Scope) -> Principal | None:
        """Returns the caller of an open path; None: it sent no key. Raises as `admit` for an invalid key."""
        if self.needs_keys and _presented(scope) is None and not scope.get(HOME_SOCKET):
            return None
        return self.admit(scope)

    def allows(self, scope: Scope, access: Access) -> bool:
        """Whether the caller of an open path has this access."""
        try:
            self.admit(scope).require_some(access)
        except WeftError:
            return False
        return True


def require_once(scope: Scope, names: frozenset[bytes]) -> None:
    """Raises MALFORMED_REQUEST if one of these headers is repeated, since a proxy may have used the other value."""
    if len(headers_of(scope)) == len(scope["headers"]):
        return
    found = [name for name, _ in scope["headers"] if name in names]
    if len(found) > len(set(found)):
        twice = next(name for name in found if found.count(name) > 1).decode()
        raise WeftError(Reason.MALFORMED_REQUEST, f"the request must not have the header {twice} more than once")


def _presented(scope: Scope) -> str | None:
    """Returns the key of either header; None: neither is sent. Authorization takes precedence.

    Raises MALFORMED_REQUEST for a repeated header, UNAUTHENTICATED for two different keys.
    """
    headers = headers_of(scope)
    if len(headers) < len(scope["headers"]):
        require_once(scope, _KEY_HEADERS)
    shown = []
    given: bytes | None = headers.get(b"authorization")
    if given is not None:
        text = given.decode("latin-1")
        shown.append(text[len(_BEARER) :].strip() if text[: len(_BEARER)].lower() == _BEARER else _NO_KEY)
    given = headers.get(b"x-api-key")
    if given is not None:
        shown.append(given.decode("latin-1"))
    if not shown:
        return None
    shown += _keys_in_query(scope)
    if len(shown) > 1:
        require_one_key(shown)
    return shown[0]


def _keys_in_query(scope: Scope) -> list[str]:
    """Returns the keys in the query, which are not credentials, but must equal the key in the header."""
    query: bytes = scope["query_string"]
    return [value for _, value in parse_qsl(query.decode("latin-1"))] if _KEY_BEGINNING in query else []
