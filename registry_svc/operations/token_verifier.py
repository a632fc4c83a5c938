"""Verification of authorizations with joserfc: tokens of a shared key."""

import hmac
import re
from collections.abc import Mapping
from typing import Any

from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jwk import OctKey
from typing_extensions import override

from registry_svc.operations.policy.governance import Refused, Verified
from registry_svc.registry_config import GovernanceConfig
from weft.api.operations.v1 import operation_pb2
from weft.kernel.errors.error_tree import invalid_field
from weft.signing.strict_json import MAX_TOKEN_BYTES, MalformedToken, from_base64url, read_envelope, read_object
from weft.signing.tokens import MAX_KEY_BYTES, MIN_KEY_BYTES, OpToken, read_op_token, shared_key_code

_ALGORITHM = "HS256"
_COMPACT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_HEX_CODE = re.compile(r"[0-9a-fA-F]{64}")
_NO_CODE = "its authentication code is not that of the shared key"


class TokenVerifier:
    """Verifies tokens of a shared key, which prove that their maker had the key, not which signers agreed."""

    def __init__(self, config: GovernanceConfig) -> None:
        """Raises INVALID_ARGUMENT for a key that cannot verify a token."""
        self._lifetime = config.token_lifetime_seconds
        self._key_bytes = config.shared_key
        self._key = _shared_key(config.shared_key)

    def verify(self, action: operation_pb2.OperationAction, authorization: str) -> Verified:
        """Returns what the authorization proves. Raises Refused and MalformedToken."""
        token = self._op_token(self._key, authorization.strip())
        if not token.allows(action):
            raise Refused("it is for another action, or for other options")
        issued_at = float(token.issued_at)
        return Verified(
            signers=token.signers, nonce=token.nonce, issued_at=issued_at, expires_at=issued_at + self._lifetime
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


def _shared_key(key: bytes) -> OctKey:
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise invalid_field("shared_key", f"must be {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes")
    try:
        return OctKey.import_key(key)
    except ValueError as error:
        raise invalid_field("shared_key", "must be random bytes, not a PEM or SSH key") from error


def _compact_payload(text: str, key: OctKey) -> bytes:
    try:
        return jws.deserialize_compact(text, key, registry=_StrictRegistry()).payload
    except (JoseError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Refused(_NO_CODE) from error


class _StrictRegistry(jws.JWSRegistry):
    """Allows one algorithm and two headers, so that no token can choose a key or a way to verify it."""

    def __init__(self) -> None:
        super().__init__(algorithms=[_ALGORITHM])
        self.header_registry = {name: self.header_registry[name] for name in ("alg", "typ")}

    @override
    def get_alg(self, name: str) -> Any:
        if name != _ALGORITHM:
            raise JoseError(f"{name!r} is not {_ALGORITHM}")
        return self.algorithms[name]
