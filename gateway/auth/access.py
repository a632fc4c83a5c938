"""Access rules: what a request's key must allow, by method and path, from the table of endpoints."""

from collections.abc import Iterable

from weft.kernel.principal import Access, Role

_READS = ("GET", "HEAD")
_ROLES = {"POST": Role.CREATE, "PUT": Role.EDIT, "PATCH": Role.EDIT, "DELETE": Role.EDIT}


class AccessRules:
    """The access that each path requires, whether or not it has an endpoint for the method.

    A path below that of an endpoint requires the same access, so that an unexpected spelling of a path never bypasses
    a rule.
    """

    def __init__(self, rows: Iterable[tuple[str, str, Access | None]]) -> None:
        """`rows`: method, path and access of each endpoint; None: callers need no key. Raises ValueError."""
        self._rules: dict[str, dict[str, Access]] = {}
        """By the fixed beginning of a path, then by method."""
        self._actions: dict[tuple[str, str, str], Access] = {}
        """By the fixed beginning of a path with a parameter, method and last segment, such as `cancel`."""
        open_paths = set()
        for method, path, access in rows:
            if access is None:
                open_paths.add(path)
            else:
                self._add(method, path, access)
        self.open_paths = frozenset(open_paths)
        """Paths that need no key: health probes have none."""
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
        return path in self.open_paths

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
