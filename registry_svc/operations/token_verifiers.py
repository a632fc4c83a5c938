"""Detached signatures: each signer signs the same bytes with a key of their own, which nobody else has."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from registry_svc.config import Signer
from registry_svc.operations.governance import Refused
from registry_svc.operations.policy.governance import Validity
from registry_svc.operations.verified import Verified
from weft.api.operations.v1 import operation_pb2
from weft.kernel.errors import invalid_field
from weft.signing.actions import same_action
from weft.signing.claims import read_payload
from weft.signing.keys import public_text, read_public_key
from weft.signing.signatures import SignedBytes, is_signed_by, read_signed

if TYPE_CHECKING:
    from joserfc.jwk import OKPKey


class SignatureVerifier:
    """See Verifier.

    A signature by a key that is unknown or revoked is not looked at and counts for nothing. One that names a known key
    and is not by it refuses the whole: the bytes are not those that were signed, or somebody tries out names.
    """

    def __init__(self, signers: Iterable[Signer], *, policy_version: str) -> None:
        self._policy_version = policy_version
        self._keys: dict[str, OKPKey] = {}
        taken = set()
        for index, signer in enumerate(signers):
            key = read_public_key(signer.public_key, f"signers[{index}].public_key")
            # Otherwise one person could agree under two names, or a revoked key live on under another.
            if (text := public_text(key)) in taken:
                raise invalid_field(f"signers[{index}].public_key", "must be a key that no other signer has")
            taken.add(text)
            if not signer.revoked:
                self._keys[signer.id] = key

    def verify(self, action: operation_pb2.OperationAction, authorization: str, audience: str) -> Verified:
        """See Verifier.verify."""
        signed = read_signed(authorization)
        signers = self._verified_signers(signed)
        named = {signature.key_id for signature in signed.signatures}
        if not signers:
            raise Refused(f"none of its {len(named)} signers counts: they are unknown or revoked")
        claims = read_payload(signed.payload_bytes)
        if claims.audience != audience:
            raise Refused("it is made out to another registry", actors=signers)
        if claims.policy_version != self._policy_version:
            raise Refused("it was made under another version of the policy", actors=signers)
        if not same_action(claims.action, action):
            raise Refused("it is for another action, or for other options", actors=signers)
        validity = Validity(issued_at=claims.issued_at, not_before=claims.not_before, expires_at=claims.expires_at)
        return Verified(signers=tuple(sorted(named)), nonce=claims.nonce, validity=validity)

    def _verified_signers(self, signed: SignedBytes) -> tuple[str, ...]:
        """Those who count and did sign, each once. The bytes are not looked into before that is known."""
        found = set()
        for signature in signed.signatures:
            key = self._keys.get(signature.key_id)
            if key is None:
                continue
            if not is_signed_by(signed, signature, key):
                raise Refused(f"the signature of {signature.key_id} is not over these bytes")
            found.add(signature.key_id)
        return tuple(sorted(found))
