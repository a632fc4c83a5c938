"""Verification of authorizations with joserfc: tokens of a shared key, and signatures of several signers."""

import hmac
import re
from collections.abc import Iterable, Mapping

from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jwk import OctKey, OKPKey

from registry_svc.config import GovernanceConfig, GovernanceMode, Signer
from registry_svc.operations.policy.governance import Refused, Verified
from weft.api.operations.v1 import operation_pb2
from weft.kernel.errors import invalid_field
from weft.signing.signatures import (
    SignedBytes,
    StrictRegistry,
    is_signed_by,
    public_text,
    read_public_key,
    read_signed,
)
from weft.signing.strict_json import MAX_TOKEN_BYTES, MalformedToken, from_base64url, read_envelope, read_object
from weft.signing.tokens import (
    MAX_KEY_BYTES,
    MIN_KEY_BYTES,
    OpToken,
    read_op_token,
    read_payload,
    same_action,
    shared_key_code,
)

_ALGORITHM = "HS256"
_COMPACT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_HEX_CODE = re.compile(r"[0-9a-fA-F]{64}")
_OTHER_ACTION = "it is for another action, or for other options"
_NO_CODE = "its authentication code is not that of the shared key"


class TokenVerifier:
    """Verifies the tokens of one governance mode.

    A shared key proves that the maker of a token had the key, not which of the named signers agreed.

    A signature by an unknown or revoked key is not verified and does not count. An invalid signature for a known key
    rejects the whole token: its bytes were changed, or someone is trying names.
    """

    def __init__(self, config: GovernanceConfig) -> None:
        """Raises INVALID_ARGUMENT for keys that cannot verify a token."""
        self._lifetime = config.token_lifetime_seconds
        self._policy_version = config.policy_version
        self._key_bytes = config.shared_key
        is_shared = config.mode is GovernanceMode.SHARED_KEY
        self._shared_key = _shared_key(config.shared_key) if is_shared else None
        self._public_keys = {} if is_shared else _public_keys(config.signers)

    def verify(self, action: operation_pb2.OperationAction, authorization: str, audience: str) -> Verified:
        """Returns what the authorization proves. Raises Refused and MalformedToken."""
        if self._shared_key is not None:
            return self._verify_code(self._shared_key, action, authorization.strip())
        return self._verify_signatures(action, read_signed(authorization), audience)

    def _verify_code(self, key: OctKey, action: operation_pb2.OperationAction, text: str) -> Verified:
        """Verifies a token of the shared key, which has no audience: the key binds it to a registry."""
        token = self._op_token(key, text)
        if not token.allows(action):
            raise Refused(_OTHER_ACTION)
        issued_at = float(token.issued_at)
        return Verified(
            signers=token.signers,
            nonce=token.nonce,
            issued_at=issued_at,
            not_before=issued_at,
            expires_at=issued_at + self._lifetime,
        )

    def _op_token(self, key: OctKey, text: str) -> OpToken:
        if len(text) > MAX_TOKEN_BYTES:
            raise MalformedToken(f"is larger than {MAX_TOKEN_BYTES // 1024} KiB")
        if _COMPACT.fullmatch(text):
            return read_op_token(read_object(_compact_payload(text, key)))
        envelope = read_envelope(text)
        op_token, code = envelope.get("opToken"), envelope.get("signature")
        if envelope.keys() != {"opToken", "signature"} or not isinstance(op_token, dict) or not isinstance(code, str):
            raise MalformedToken("is not an opToken with its signature")
        self._require_code(op_token, code)
        return read_op_token(op_token)

    def _require_code(self, op_token: Mapping[str, object], code: str) -> None:
        expected = shared_key_code(op_token, self._key_bytes)
        given = bytes.fromhex(code) if _HEX_CODE.fullmatch(code) else from_base64url(code)
        if not hmac.compare_digest(expected, given):
            raise Refused(_NO_CODE)

    def _verify_signatures(self, action: operation_pb2.OperationAction, signed: SignedBytes, audience: str) -> Verified:
        signers = self._proven_signers(signed)
        named = {signature.key_id for signature in signed.signatures}
        if not signers:
            raise Refused(f"none of its {len(named)} signers counts: they are unknown or revoked")
        claims = read_payload(signed.payload_bytes)
        if claims.audience != audience:
            raise Refused("it is issued for another registry", actors=signers)
        if claims.policy_version != self._policy_version:
            raise Refused("it was made under another version of the policy", actors=signers)
        if not same_action(claims.action, action):
            raise Refused(_OTHER_ACTION, actors=signers)
        return Verified(
            signers=tuple(sorted(named)),
            nonce=claims.nonce,
            issued_at=claims.issued_at,
            not_before=claims.not_before,
            expires_at=claims.expires_at,
        )

    def _proven_signers(self, signed: SignedBytes) -> tuple[str, ...]:
        """Returns the valid signers, unique and sorted. The payload must not be parsed before."""
        found = set()
        for signature in signed.signatures:
            key = self._public_keys.get(signature.key_id)
            if key is None:
                continue
            if not is_signed_by(signed, signature, key):
                raise Refused(f"the signature of {signature.key_id} is not over these bytes")
            found.add(signature.key_id)
        return tuple(sorted(found))


def _shared_key(key: bytes) -> OctKey:
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise invalid_field("shared_key", f"must be {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes")
    try:
        return OctKey.import_key(key)
    except ValueError as error:
        raise invalid_field("shared_key", "must be random bytes, not a key for signatures") from error


def _public_keys(signers: Iterable[Signer]) -> dict[str, OKPKey]:
    """Returns the keys of signers that are not revoked. Raises INVALID_ARGUMENT for a key that two signers have."""
    keys: dict[str, OKPKey] = {}
    taken = set()
    for index, signer in enumerate(signers):
        key = read_public_key(signer.public_key or "", f"signers[{index}].public_key")
        # Otherwise one person could agree under two names, or a revoked key could stay valid under another.
        if (text := public_text(key)) in taken:
            raise invalid_field(f"signers[{index}].public_key", "must be a key that no other signer has")
        taken.add(text)
        if not signer.revoked:
            keys[signer.id] = key
    return keys


def _compact_payload(text: str, key: OctKey) -> bytes:
    try:
        return jws.deserialize_compact(text, key, registry=StrictRegistry(_ALGORITHM, ("alg", "typ"))).payload
    except (JoseError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(_NO_CODE) from error
