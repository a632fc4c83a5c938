"""The caller of a request and its permissions, for HTTP and gRPC.

A scope is a resource and a role, such as `models:view`; `*` means all resources or all roles. A name or prefix after
the resource limits the scope: `models/team-a:edit`, `inference/team-*:create`.
"""

import hmac
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from typing import NamedTuple

from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft.kernel.values.names import DEFAULT_TENANT, is_model_name

KEY_PREFIX = "weft"
KEY_ID_CHARS = 12
SECRET_BYTES = 32
MAX_KEY_CHARS = 256
MAX_SCOPES = 32
ANY = "*"
_KEY = re.compile(rf"{KEY_PREFIX}_([a-z0-9]{{{KEY_ID_CHARS}}})_([0-9a-f]{{{2 * SECRET_BYTES}}})", re.ASCII)
# Compared if the key id is unknown, so that a wrong id takes as long as a wrong secret.
_NO_DIGEST = bytes(32)


class Resource(StrEnum):
    """Resources that roles are granted for."""

    __hash__ = object.__hash__  # without a call of Python for each check of a caller's access
    INFERENCE = "inference"
    """Requests to models, their receipts, and stored answers."""
    REMOTE = "remote"
    """Requests to remote models, which may cost money: `create` allows them if the tenant may use them."""
    MODELS = "models"
    """Models, pools, agents and routes."""
    RUNNERS = "runners"
    """Runners, their sessions and join tokens, and leases of accelerator memory."""
    OPERATIONS = "operations"
    """Loads, unloads and flushes, and their audit."""
    SETTINGS = "settings"
    """Mesh settings and tenants."""
    KEYS = "keys"
    SECRETS = "secrets"
    """Secrets of the mesh, such as API keys of providers. Their values are never shown."""
    TELEMETRY = "telemetry"
    """Metrics, events, and statistics of clients."""
    MESH = "mesh"
    """Calls between services of the mesh: placement, tickets, sessions. Its holder can act for any tenant."""


class Role(StrEnum):
    """Actions on a resource. Create and edit include view."""

    __hash__ = object.__hash__
    VIEW = "view"
    CREATE = "create"
    EDIT = "edit"
    """Change and delete."""


NAMED_RESOURCES = frozenset({Resource.INFERENCE, Resource.MODELS, Resource.OPERATIONS})
"""Resources with scopes that can be limited to names of models, pools, agents and routes."""


class Access(NamedTuple):
    """The resource and role that a call needs, or that a key has."""

    # Looked up in sets several times per request: as a tuple of texts, without calls of Python.
    resource: Resource
    role: Role
    name: str = ""
    """Name, or prefix and `*`, to which the access is limited; empty: unlimited."""

    def __str__(self) -> str:
        return f"{self.resource.value}{f'/{self.name}' if self.name else ''}:{self.role.value}"

    def includes(self, name: str) -> bool:
        """Whether it covers a name, or all names that match a prefix and `*`."""
        if self.name.endswith(ANY):
            return name.startswith(self.name[:-1])
        return not self.name or name == self.name


_EVERYTHING = frozenset(Access(resource, role) for resource in Resource for role in Role)
MESH_ACCESS = Access(Resource.MESH, Role.CREATE)
EDIT_MODELS = Access(Resource.MODELS, Role.EDIT)
"""Required for declaring and deleting models, agents and routes."""
VIEW_MODELS = Access(Resource.MODELS, Role.VIEW)
"""Required for seeing models, pools, agents and routes."""
VIEW_RUNNERS = Access(Resource.RUNNERS, Role.VIEW)
"""Required for seeing runners and engine logs."""
USE_MODELS = Access(Resource.INFERENCE, Role.CREATE)
"""Required for requests to models, agents and routes."""
VIEW_REQUESTS = Access(Resource.INFERENCE, Role.VIEW)
"""Required for seeing one's requests, tasks, batches, files and stored responses."""
EDIT_REQUESTS = Access(Resource.INFERENCE, Role.EDIT)
"""Required for cancelling and deleting them."""
OPERATE = Access(Resource.OPERATIONS, Role.CREATE)
"""Required for loads, unloads and flushes."""
EDIT_SETTINGS = Access(Resource.SETTINGS, Role.EDIT)
"""Required for declaring and deleting tenants, whose limits apply to callers who may declare models."""
USE_SECRETS = Access(Resource.SECRETS, Role.CREATE)
"""Required for naming a variable or a secret, whose value is sent to the address that is named with it."""
ANY_SOURCE = Access(Resource.MODELS, Role.EDIT)
"""Required for naming an address, a file or a tool: processes of the mesh then call any server, read any file, or run
tools that their owner gave to others."""
RUN_PROGRAMS = (ANY_SOURCE, USE_SECRETS, Access(Resource.KEYS, Role.EDIT))
"""Required for naming a program: it runs as the mesh's user, who can read secrets and create keys."""
MAY_LEAVE = Access(Resource.REMOTE, Role.CREATE)
"""Required for requests to remote models, besides the tenant's permission."""
VIEW_TELEMETRY = Access(Resource.TELEMETRY, Role.VIEW)
"""Required for metrics, events, and statistics of clients."""
KEY_VARIABLES = frozenset({"WEFT_API_KEY", "WEFT_SERVICE_KEY", "WEFT_JOIN_TOKEN", "WEFT_JOIN_URL"})
"""Environment variables with mesh keys, removed from the environment of programs that a runner starts."""
DEFAULT_SCOPES = ("inference:create", "inference:edit", "models:view")
"""Scopes of a key that is created without scopes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An authenticated caller."""

    name: str
    """Name in logs and the audit: `key:<id>`, `local`, or `service:<name>`."""
    tenant: str = DEFAULT_TENANT
    access: frozenset[Access] = frozenset()
    names_tenants: bool = False
    """Whether the caller may set the tenant of a request."""
    max_priority: Priority = Priority.HIGH
    """Highest priority class of its requests."""

    def may(self, access: Access) -> bool:
        """Whether it has this access, unlimited or at least for the names in `access`."""
        return access in self.access or (bool(access.name) and self.may_name(access, access.name))

    def may_name(self, access: Access, name: str) -> bool:
        """Whether it has the access to a name."""
        if (Access(access.resource, access.role) if access.name else access) in self.access:
            return True
        return any(limited.includes(name) for limited in self._limited(access))

    def names_for(self, access: Access) -> tuple[str, ...] | None:
        """Returns the names and prefixes to which its access is limited, sorted; None: unlimited."""
        if access in self.access:
            return None
        return tuple(sorted(limited.name for limited in self._limited(access)))

    def require(self, access: Access) -> None:
        """Raises PERMISSION_DENIED naming the missing scope."""
        if not self.may(access):
            raise self._lacks(access)

    def require_some(self, access: Access) -> None:
        """Raises PERMISSION_DENIED if it has this access to no name at all."""
        if access not in self.access and not self._limited(access):
            raise self._lacks(access)

    def require_name(self, access: Access, name: str) -> None:
        """Raises PERMISSION_DENIED naming the missing scope, if it lacks the access to a name."""
        if not self.may_name(access, name):
            raise self._lacks(access._replace(name=name), {"name": name})

    def _lacks(self, access: Access, metadata: Mapping[str, str] | None = None) -> WeftError:
        what = f"the key lacks the scope {access}" if self.name != OTHER_USER.name else f"{_OF_ITS_USER} ({access})"
        return WeftError(Reason.PERMISSION_DENIED, what, metadata=metadata)

    def require_priority(self, ceiling: Priority) -> None:
        """Raises PERMISSION_DENIED for a key with a higher priority class than its own."""
        if ceiling < self.max_priority:
            most = self.max_priority.name.lower()
            raise FieldError("max_priority", f"the caller's key allows at most {most}", Reason.PERMISSION_DENIED)

    def _limited(self, access: Access) -> list[Access]:
        kind = (access.resource, access.role)
        return [each for each in self.access if each.name and (each.resource, each.role) == kind]

    def tenant_for(self, claimed: str, field_name: str) -> str:
        """Returns the tenant of a call that claims `claimed`; empty: no claim.

        Raises PERMISSION_DENIED naming the field if the caller may not act for that tenant.
        """
        if not claimed or claimed == self.tenant:
            return self.tenant
        if not self.names_tenants:
            raise WeftError(
                Reason.PERMISSION_DENIED, f"{field_name}: the key is of another tenant", metadata={"field": field_name}
            )
        return claimed


LOCAL = Principal(name="local", access=_EVERYTHING, names_tenants=True)
"""The user that runs weft: over a socket that only this user can reach, or over loopback if no keys are required."""
OTHER_USER = Principal(
    name="other-user",
    access=frozenset(Access(resource, Role.VIEW) for resource in Resource if resource is not Resource.MESH)
    | {USE_MODELS, MAY_LEAVE},
    names_tenants=True,
)
"""Another or an unknown user of this machine, over loopback, if no keys are required."""
_OF_ITS_USER = (
    "without keys, only the user that runs weft may do this; other users of the machine need auth.required: true and a "
    "key (weft keys create), or, if weft runs with the group weft, membership in that group"
)


def actor_words(name: str) -> str:
    """Returns a caller's name for display. "local" would read like the name of a runner or user."""
    return "an operator on this machine" if name == LOCAL.name else name


def service_principal(name: str) -> Principal:
    """Returns the principal of a service with a client certificate."""
    return Principal(name=f"service:{name}", access=_EVERYTHING, names_tenants=True)


def parse_scope(text: str, field_name: str) -> frozenset[Access]:
    """Returns the access of a scope. Raises INVALID_ARGUMENT naming the field and the valid scopes."""
    # Names may have colons.
    subject, _, role = text.rpartition(":")
    resource, slash, name = subject.partition("/")
    resources = [known for known in Resource if resource in (ANY, known.value)]
    # `*` is for people and programs; mesh access must be explicit.
    if resource == ANY:
        resources.remove(Resource.MESH)
    roles = [known for known in Role if role in (ANY, known.value)]
    if not resources or not roles:
        raise invalid_field(
            field_name,
            f"'{text[:64]}' must be <resource>:<role>, with a resource of {_words(Resource)} or *, "
            f"and a role of {_words(Role)} or *",
        )
    if slash:
        _require_pattern(name, resources, field_name)
    return frozenset(Access(one, each, name) for one in resources for role in roles for each in (role, Role.VIEW))


def _require_pattern(name: str, resources: Iterable[Resource], field_name: str) -> None:
    """Raises INVALID_ARGUMENT for an invalid name or prefix, or resources without names."""
    if not is_model_name(name.removesuffix("/" + ANY).removesuffix(ANY)):
        raise invalid_field(
            field_name, f"'{name[:64]}' must be a name, or the beginning of names and *, such as team-a or team-*"
        )
    if not NAMED_RESOURCES.issuperset(resources):
        words = ", ".join(sorted(resource.value for resource in NAMED_RESOURCES))
        raise invalid_field(field_name, f"a name limits scopes of {words} only; leave '/{name[:64]}' out")


def parse_scopes(texts: Iterable[str], field_name: str) -> frozenset[Access]:
    """Returns the access of several scopes. Raises INVALID_ARGUMENT naming the field."""
    given = tuple(texts)
    if len(given) > MAX_SCOPES:
        raise invalid_field(field_name, f"must have at most {MAX_SCOPES} entries")
    return frozenset[Access]().union(*(parse_scope(text, f"{field_name}[{index}]") for index, text in enumerate(given)))


def kept_access(scopes: Iterable[str]) -> frozenset[Access]:
    """Returns the access of stored scopes. An unknown scope, from a newer release, grants nothing."""
    access = frozenset[Access]()
    for scope in scopes:
        with suppress(FieldError):
            access |= parse_scope(scope, "scopes")
    return access


def _words(words: Iterable[StrEnum]) -> str:
    return ", ".join(word.value for word in words)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyVerifier:
    """The data to verify one key."""

    key_id: str
    tenant: str
    access: frozenset[Access]
    digest: bytes
    """Digest of the secret; see `key_digest`."""
    expires_at: datetime | None = None
    previous_digest: bytes = b""
    """Digest of the secret before the last rotation; empty: none."""
    previous_expires_at: datetime | None = None
    max_priority: Priority = Priority.HIGH
    principal: Principal = field(init=False, repr=False, compare=False)
    """The caller who presents the key."""

    def __post_init__(self) -> None:
        principal = Principal(
            name=f"key:{self.key_id}",
            tenant=self.tenant,
            access=self.access,
            names_tenants=MESH_ACCESS in self.access,
            max_priority=self.max_priority,
        )
        object.__setattr__(self, "principal", principal)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRing:
    """All keys that may be valid."""

    pepper: bytes = b""
    keys: Mapping[str, KeyVerifier] = field(default_factory=dict)


def key_digest(pepper: bytes, secret: str) -> bytes:
    """Returns the digest of a secret: HMAC-SHA256. Secrets are random, so a slow hash would add no protection."""
    return hmac.digest(pepper, secret.encode(), sha256)


def key_text(key_id: str, secret: str) -> str:
    """Returns the full text of a key."""
    return f"{KEY_PREFIX}_{key_id}_{secret}"


def require_one_key(shown: Iterable[str]) -> None:
    """Raises UNAUTHENTICATED for a call with two different keys, since a proxy in front may have checked the other one.

    Credentials other than weft keys are ignored: SDKs also send a provider's key.
    """
    if len({text for text in shown if len(text) <= MAX_KEY_CHARS and _KEY.fullmatch(text)}) > 1:
        raise WeftError(Reason.UNAUTHENTICATED, "the request has two different API keys: send one")


def authenticate(ring: KeyRing, presented: str | None, now: datetime) -> Principal:
    """Returns the principal of a key. Raises UNAUTHENTICATED without revealing what is wrong with the key."""
    if not presented:
        raise WeftError(
            Reason.UNAUTHENTICATED, "an API key is required: send 'Authorization: Bearer <key>' or 'x-api-key: <key>'"
        )
    found = _KEY.fullmatch(presented) if len(presented) <= MAX_KEY_CHARS else None
    verifier = ring.keys.get(found[1]) if found else None
    digest = key_digest(ring.pepper, found[2] if found else "")
    good = _is_good(verifier or _NO_VERIFIER, digest, now)
    if verifier is None or not good:
        raise WeftError(Reason.UNAUTHENTICATED, "the key is not valid")
    return verifier.principal


_NO_VERIFIER = KeyVerifier(key_id="", tenant="", access=frozenset(), digest=_NO_DIGEST)


def _is_good(verifier: KeyVerifier, digest: bytes, now: datetime) -> bool:
    is_current = hmac.compare_digest(digest, verifier.digest)
    until = verifier.previous_expires_at
    # Always compare, so that the duration reveals nothing about the key.
    is_previous = (
        hmac.compare_digest(digest, verifier.previous_digest or _NO_DIGEST) and until is not None and now < until
    )
    is_in_time = verifier.expires_at is None or now < verifier.expires_at
    return (is_current or is_previous) and is_in_time
