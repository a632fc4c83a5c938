"""Verifiers of authorizations: tokens of a shared key, and detached signatures by several signers."""

import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jwk import OctKey
from typing_extensions import override

from registry_svc.config import Signer
from registry_svc.operations.governance import Refused, Verified, Verifier
from registry_svc.operations.policy.governance import Validity
from weft.api.operations.v1 import operation_pb2
from weft.kernel.errors import invalid_field
from weft.signing.actions import same_action
from weft.signing.signatures import SignedBytes, is_signed_by, public_text, read_public_key, read_signed
from weft.signing.strict_json import MAX_TOKEN_BYTES, MalformedToken, from_base64url, read_object
from weft.signing.tokens import MAX_KEY_BYTES, MIN_KEY_BYTES, OpToken, read_op_token, read_payload, shared_key_code

if TYPE_CHECKING:
    from joserfc.jwk import OKPKey


_ALGORITHM = "HS256"
_COMPACT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_HEX_CODE = re.compile(r"[0-9a-fA-F]{64}")


class SharedKeyVerifier:
    """Verifies tokens of a shared key. It proves that the maker had the key, not which named signers agreed."""

    def __init__(self, key: bytes, *, lifetime_seconds: float) -> None:
        if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            raise invalid_field("shared_key", f"must be {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes")
        self._key = key
        self._lifetime = lifetime_seconds
        try:
            self._jose_key = OctKey.import_key(key)
        except ValueError as error:
            raise invalid_field("shared_key", "must be random bytes, not a key for signatures") from error

    def verify(self, action: operation_pb2.OperationAction, authorization: str, audience: str) -> Verified:
        """See Verifier.verify. These tokens name no audience: the key ties them to a registry."""
        del audience
        token = self._read(authorization.strip())
        if not token.allows(action):
            raise Refused("it is for another action, or for other options")
        issued_at = float(token.issued_at)
        validity = Validity(issued_at=issued_at, not_before=issued_at, expires_at=issued_at + self._lifetime)
        return Verified(signers=token.signers, nonce=token.nonce, validity=validity)

    def _read(self, text: str) -> OpToken:
        if len(text) > MAX_TOKEN_BYTES:
            raise MalformedToken(f"is larger than {MAX_TOKEN_BYTES // 1024} KiB")
        if _COMPACT.fullmatch(text):
            return read_op_token(read_object(self._signed_payload(text)))
        data = text.encode("utf-8", "surrogatepass")
        envelope = read_object(data if text.startswith("{") else from_base64url(text))
        op_token, code = envelope.get("opToken"), envelope.get("signature")
        if envelope.keys() != {"opToken", "signature"} or not isinstance(op_token, dict) or not isinstance(code, str):
            raise MalformedToken("is not an opToken with its signature")
        self._require_code(op_token, code)
        return read_op_token(op_token)

    def _signed_payload(self, text: str) -> bytes:
        try:
            return jws.deserialize_compact(
                text, self._jose_key, registry=_HmacRegistry(algorithms=[_ALGORITHM])
            ).payload
        except (JoseError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise Refused("its authentication code is not that of the shared key") from error

    def _require_code(self, op_token: Mapping[str, Any], code: str) -> None:
        expected = shared_key_code(op_token, self._key)
        given = bytes.fromhex(code) if _HEX_CODE.fullmatch(code) else from_base64url(code)
        if not hmac.compare_digest(expected, given):
            raise Refused("its authentication code is not that of the shared key")


class _HmacRegistry(jws.JWSRegistry):
    """Allows one algorithm, and the type header: nothing in a token chooses a key or a way to verify."""

    max_payload_length = MAX_TOKEN_BYTES

    def __init__(self, algorithms: Sequence[str]) -> None:
        super().__init__(algorithms=algorithms)
        self.header_registry = {name: self.header_registry[name] for name in ("alg", "typ")}


class SignatureVerifier(Verifier):
    """Verifies detached signatures.

    A signature by an unknown or revoked key is not verified and does not count. One that names a known key and is not
    by it refuses the whole token: the bytes are not those that were signed, or names are being tried.
    """

    def __init__(self, signers: Iterable[Signer], *, policy_version: str) -> None:
        self._policy_version = policy_version
        self._keys: dict[str, OKPKey] = {}
        taken = set()
        for index, signer in enumerate(signers):
            key = read_public_key(signer.public_key or "", f"signers[{index}].public_key")
            # Otherwise one person could agree under two names, or a revoked key stay valid under another.
            if (text := public_text(key)) in taken:
                raise invalid_field(f"signers[{index}].public_key", "must be a key that no other signer has")
            taken.add(text)
            if not signer.revoked:
                self._keys[signer.id] = key

    @override
    def verify(self, action: operation_pb2.OperationAction, authorization: str, audience: str) -> Verified:
        signed = read_signed(authorization)
        signers = self._verified_signers(signed)
        named = {signature.key_id for signature in signed.signatures}
        if not signers:
            raise Refused(f"none of its {len(named)} signers counts: they are unknown or revoked")
        claims = read_payload(signed.payload_bytes)
        if claims.audience != audience:
            raise Refused("it is issued for another registry", actors=signers)
        if claims.policy_version != self._policy_version:
            raise Refused("it was made under another version of the policy", actors=signers)
        if not same_action(claims.action, action):
            raise Refused("it is for another action, or for other options", actors=signers)
        validity = Validity(issued_at=claims.issued_at, not_before=claims.not_before, expires_at=claims.expires_at)
        return Verified(signers=tuple(sorted(named)), nonce=claims.nonce, validity=validity)

    def _verified_signers(self, signed: SignedBytes) -> tuple[str, ...]:
        """Return the valid signers that signed, each once. The bytes are not parsed before that is known."""
        found = set()
        for signature in signed.signatures:
            key = self._keys.get(signature.key_id)
            if key is None:
                continue
            if not is_signed_by(signed, signature, key):
                raise Refused(f"the signature of {signature.key_id} is not over these bytes")
            found.add(signature.key_id)
        return tuple(sorted(found))
