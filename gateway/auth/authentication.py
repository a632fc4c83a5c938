"""Authentication and authorization of HTTP requests: the API key, and the access that each path requires.

`weft.kernel.principal` verifies the key; the access rules follow from the table of endpoints.
"""

from collections.abc import Iterable
from typing import Protocol
from urllib.parse import parse_qsl

from starlette.types import Scope
from typing_extensions import override

from gateway.request_facts import headers_of
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.principal import KEY_PREFIX, LOCAL, Access, KeyRing, Principal, Role, authenticate, require_one_key
from weft.kernel.reasons import Reason

_BEARER = "bearer "
_KEY_BEGINNING = f"{KEY_PREFIX}_".encode()
_KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
_NO_KEY = "-"
"""Stands for credentials of another kind; it is no valid key."""


_ANY_PATH = "{path:path}"
"""Ends the path of an endpoint that answers every path below it."""
_READS = ("GET", "HEAD")
_ROLES = {"POST": Role.CREATE, "PUT": Role.EDIT, "PATCH": Role.EDIT, "DELETE": Role.EDIT}


class AccessRules:
    """The access that each path requires, whether or not it has an endpoint for the method.

    A path below that of an endpoint requires the same access, so that an unexpected spelling of a path never bypasses
    a rule.
    """

    def __init__(self, rows: Iterable[tuple[str, str, Access | None]], keyed_paths: Iterable[str] = ()) -> None:
        """`rows`: method, path and access of each endpoint; None: callers need no key. Raises ValueError.

        `keyed_paths`: those whose endpoint checks the scopes itself; callers need a valid key.
        """
        self._rules: dict[str, dict[str, Access]] = {}
        """By the fixed beginning of a path, then by method."""
        self._actions: dict[tuple[str, str, str], Access] = {}
        """By the fixed beginning of a path with a parameter, method and last segment, such as `cancel`."""
        open_paths, open_folders = set(), set()
        for method, path, access in rows:
            if access is None and path.endswith(_ANY_PATH):
                open_folders.add(path.removesuffix(_ANY_PATH))
            elif access is None:
                open_paths.add(path)
            else:
                self._add(method, path, access)
        self.open_paths = frozenset(open_paths)
        """Paths that need no key: health probes have none."""
        self._open_folders = tuple(open_folders)
        self.keyed_paths = frozenset(keyed_paths)
        """Paths that need a valid key with whatever scopes: which, follows from the request."""
        for rule in self._rules.values():
            _complete(rule)

    def _add(self, method: str, path: str, access: Access) -> None:
        beginning, brace, _ = path.partition("/{")
        rule = self._rules.setdefault(beginning, {})
        action = path.rpartition("/")[2]
        if brace and "{" not in action:
            self._actions[beginning, method, action] = access
            rule.setdefault("", access)
        elif rule.setdefault(method, access) != access:
            raise ValueError(f"{method} {path} asks for {access}, another path under {beginning} for {rule[method]}")

    def is_open(self, path: str) -> bool:
        """Whether the path is answered without a key."""
        return path in self.open_paths or path.startswith(self._open_folders)

    def access_of(self, method: str, path: str) -> Access | None:
        """Returns the access that a request requires, by its longest known path prefix; None: no such endpoint."""
        beginning = path
        while beginning:
            rule = self._rules.get(beginning)
            if rule is not None:
                found = self._actions.get((beginning, method, path.rpartition("/")[2])) if beginning != path else None
                return found or rule.get(method)
            beginning = beginning.rpartition("/")[0]
        return None


def _complete(rule: dict[str, Access]) -> None:
    """Adds rules for methods without an endpoint: the method's usual role on the same resource.

    A path that has only reads gets no other methods.
    """
    known = set(rule) - {""}
    resource = next(iter(rule.values())).resource
    rule.pop("", None)
    for method in _READS:
        rule.setdefault(method, Access(resource, Role.VIEW))
    if known - set(_READS) or not known:
        for method, role in _ROLES.items():
            rule.setdefault(method, Access(resource, role))


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

    @property
    def needs_keys(self) -> bool:
        """Whether callers need API keys."""
        ...

    def admit(self, scope: Scope) -> Principal:
        """Returns the caller.

        Raises UNAUTHENTICATED, PERMISSION_DENIED, MALFORMED_REQUEST for a repeated header, and SERVICE_UNAVAILABLE
        before the keys are known.
        """
        ...

    def allows(self, scope: Scope, access: Access) -> bool:
        """Whether a caller of an open path has this access, too."""
        ...

    def identify(self, scope: Scope) -> Principal | None:
        """Returns the caller of an open path; None: it has no key. Raises as `admit` for a key that is not valid."""
        ...


class OpenGate(Gate):
    """Admits every request as local: for loopback without keys."""

    needs_keys = False

    @override
    def admit(self, scope: Scope) -> Principal:
        return LOCAL

    @override
    def allows(self, scope: Scope, access: Access) -> bool:
        return True

    @override
    def identify(self, scope: Scope) -> Principal | None:
        return LOCAL


class KeyGate(Gate):
    """Admits requests that have a valid key whose scopes allow the endpoint."""

    needs_keys = True

    def __init__(self, keys: KeyRingSource, rules: AccessRules, clock: Clock) -> None:
        self._keys = keys
        self._rules = rules
        self._clock = clock

    @override
    def admit(self, scope: Scope) -> Principal:
        path: str = scope["path"]
        if self._rules.is_open(path):
            return LOCAL
        principal = self._authenticated(_presented(scope))
        access = self._rules.access_of(scope["method"], path)
        if access is not None:
            # Whether it suffices that the scope is limited to names, the endpoint says: see `gateway.routing`.
            principal.require_some(access)
        return principal

    def _authenticated(self, presented: str | None) -> Principal:
        if presented is not None and not self._keys.is_ready:
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE, "the gateway has not loaded the API keys yet", retry_after_seconds=1
            )
        return authenticate(self._keys.ring, presented, self._clock.utc_now())

    @override
    def identify(self, scope: Scope) -> Principal | None:
        presented = _presented(scope)
        return None if presented is None else self._authenticated(presented)

    @override
    def allows(self, scope: Scope, access: Access) -> bool:
        try:
            principal = authenticate(self._keys.ring, _presented(scope), self._clock.utc_now())
            principal.require_some(access)
        except WeftError:
            return False
        return True


def require_once(scope: Scope, names: frozenset[bytes]) -> None:
    """Raises MALFORMED_REQUEST where a header of these names is repeated: a proxy may have used the other one."""
    if len(headers_of(scope)) == len(scope["headers"]):
        return
    found = [name for name, _ in scope["headers"] if name in names]
    if len(found) > len(set(found)):
        twice = next(name for name in found if found.count(name) > 1).decode()
        raise WeftError(Reason.MALFORMED_REQUEST, f"the request must not have the header {twice} more than once")


def _presented(scope: Scope) -> str | None:
    """Returns the key of either header; None: there is none. Authorization takes precedence.

    Raises MALFORMED_REQUEST where one of the headers is repeated, UNAUTHENTICATED for two different keys.
    """
    require_once(scope, _KEY_HEADERS)
    headers = headers_of(scope)
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
    """Returns keys in the query, which are never used as credentials; beside one they must be the same key."""
    query: bytes = scope["query_string"]
    return [value for _, value in parse_qsl(query.decode("latin-1"))] if _KEY_BEGINNING in query else []
