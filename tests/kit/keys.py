"""API keys for tests: all with the same secret, told apart by their ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from weft.kernel.access.principal import DEFAULT_SCOPES, KeyRing, KeyVerifier, key_digest, key_text, parse_scopes

PEPPER, SECRET = b"p" * 32, "5" * 64
KEY = "abcdefghijk1"
"""The id of the only key of most tests."""


def verifier(
    key_id: str = KEY, scopes: Sequence[str] = DEFAULT_SCOPES, tenant: str = "ann", **more: Any
) -> KeyVerifier:
    access, digest = parse_scopes(scopes, "scopes"), key_digest(PEPPER, SECRET)
    return KeyVerifier(key_id=key_id, tenant=tenant, access=access, digest=digest, **more)


def ring_of(*verifiers: KeyVerifier) -> KeyRing:
    return KeyRing(pepper=PEPPER, keys={each.key_id: each for each in verifiers})


def ring(scopes: Mapping[str, Sequence[str]], tenant: str = "ann", tenants: Mapping[str, str] | None = None) -> KeyRing:
    """Returns keys with scopes by their ids; `tenants` has those that are not of `tenant`."""
    others = tenants or {}
    return ring_of(*(verifier(key_id, given, others.get(key_id, tenant)) for key_id, given in scopes.items()))


class Keys:
    """The keys of a gateway: a ring, one as `ring` makes it, or KEY with these scopes."""

    def __init__(
        self,
        scopes: KeyRing | Mapping[str, Sequence[str]] | Sequence[str] = DEFAULT_SCOPES,
        tenant: str = "ann",
        tenants: Mapping[str, str] | None = None,
        *,
        is_ready: bool = True,
    ) -> None:
        given = scopes if isinstance(scopes, KeyRing | Mapping) else {KEY: scopes}
        self.ring = given if isinstance(given, KeyRing) else ring(given, tenant, tenants)
        self.is_ready = is_ready


def bearer(key_id: str = KEY, secret: str = SECRET) -> dict[str, str]:
    """Returns the header of a caller with this key; none for an empty id."""
    return {"Authorization": f"Bearer {key_text(key_id, secret)}"} if key_id else {}


def as_key(key_id: str = KEY) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of a gRPC call with this key."""
    return (("x-api-key", key_text(key_id, SECRET)),)
