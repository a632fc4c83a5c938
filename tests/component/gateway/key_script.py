"""Keys of a gateway under test: one for each set of scopes, all with the same secret."""

from collections.abc import Mapping, Sequence

from weft.kernel.principal import KeyRing, KeyVerifier, key_digest, key_text, parse_scopes

PEPPER, SECRET = b"p" * 32, "5" * 64


class Keys:
    """The keys of a gateway: their scopes by their ids, and the tenants of those that are not of `tenant`."""

    is_ready = True

    def __init__(
        self, scopes: Mapping[str, Sequence[str]], tenant: str = "ann", tenants: Mapping[str, str] | None = None
    ) -> None:
        digest, others = key_digest(PEPPER, SECRET), tenants or {}
        self.ring = KeyRing(
            pepper=PEPPER,
            keys={
                key_id: KeyVerifier(
                    key_id=key_id,
                    tenant=others.get(key_id, tenant),
                    access=parse_scopes(given, "scopes"),
                    digest=digest,
                )
                for key_id, given in scopes.items()
            },
        )


def bearer(key_id: str) -> dict[str, str]:
    """The header of a caller with this key; without a key if it is empty."""
    return {"Authorization": f"Bearer {key_text(key_id, SECRET)}"} if key_id else {}
