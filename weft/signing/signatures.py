"""Ed25519 signatures of several signers over the same bytes, as a JWS in general JSON form (RFC 7515, RFC 8037)."""

import json
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jwk import OKPKey
from typing_extensions import override

from weft.kernel.errors import invalid_field
from weft.signing.strict_json import (
    MAX_TOKEN_BYTES,
    MalformedToken,
    from_base64url,
    read_envelope,
    read_object,
    to_base64url,
)
from weft.signing.tokens import MAX_SIGNERS

MAX_KEY_FILE_BYTES = 16 * 1024
PUBLIC_KEY_BYTES = 32
_CURVE = "Ed25519"


def new_key_file(path: Path, field: str) -> str:
    """Writes a new private key to `path`, readable only by its owner. Returns the public key.

    Raises INVALID_ARGUMENT naming `field` if the file exists or cannot be written.
    """
    key = OKPKey.generate_key("Ed25519")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise invalid_field(field, f"{path} exists already; a key is never overwritten") from error
    except OSError as error:
        raise invalid_field(field, f"{path} cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key.as_pem(private=True))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # A part of a key would be in the way of the next one.
        with suppress(OSError):
            path.unlink()
        raise invalid_field(field, f"{path} cannot be written: {error.strerror}") from error
    return public_text(key)


def read_private_key(path: Path, field: str) -> OKPKey:
    """Returns the private key in a PEM file (PKCS 8, unencrypted). Raises INVALID_ARGUMENT naming `field`."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise invalid_field(field, f"{path} cannot be read: {error.strerror}") from error
    wrong = invalid_field(field, f"{path} must be an Ed25519 private key in PEM without a passphrase")
    if len(content) > MAX_KEY_FILE_BYTES or b"PRIVATE KEY-----" not in content:
        raise wrong
    try:
        key = OKPKey.import_key(content)
    except (JoseError, ValueError, TypeError) as error:
        raise wrong from error
    if key.curve_name != _CURVE or not key.is_private:
        raise wrong
    return key


def public_text(key: OKPKey) -> str:
    """Returns the public part of a key in base64url."""
    return str(key.as_dict(private=False)["x"])


def read_public_key(text: str, field: str) -> OKPKey:
    """Returns the public key in a text from `public_text`. Raises INVALID_ARGUMENT naming `field`."""
    try:
        if len(from_base64url(text)) != PUBLIC_KEY_BYTES:
            raise MalformedToken("has another length")
        return OKPKey.import_key({"kty": "OKP", "crv": _CURVE, "x": text.rstrip("=")})
    except (JoseError, ValueError) as error:
        raise invalid_field(
            field, "must be an Ed25519 public key in base64url, as `weft keys sign new-key` prints it"
        ) from error


ALGORITHM = "EdDSA"
TYPE = "weft-op+json"
MAX_KEY_ID_CHARS = 128
# Room for a key id of 128 characters, escaped, with algorithm and type.
MAX_HEADER_CHARS = 512

_HEADER_NAMES = frozenset({"alg", "kid", "typ"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One signature, unverified."""

    key_id: str
    protected: str
    """The protected header in base64url, as signed."""
    signature: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedBytes:
    """Bytes and their signatures, all unverified."""

    payload: str
    """Base64url, as signed."""
    signatures: tuple[Signature, ...]

    @property
    def payload_bytes(self) -> bytes:
        """The signed bytes. Raises MalformedToken."""
        return from_base64url(self.payload)

    def as_text(self) -> str:
        """Returns the JWS as JSON for files."""
        signatures = [{"protected": each.protected, "signature": each.signature} for each in self.signatures]
        return json.dumps({"payload": self.payload, "signatures": signatures}, indent=2) + "\n"


def sign(payload: bytes, key: OKPKey, key_id: str, *, beside: Sequence[Signature] = ()) -> SignedBytes:
    """Returns `payload` with the signatures `beside` and one by `key`.

    Raises INVALID_ARGUMENT naming `signatures` if a token cannot hold them.
    """
    header = {"alg": ALGORITHM, "kid": key_id, "typ": TYPE}
    made: Any = jws.serialize_json(
        {"protected": header}, payload, key, registry=StrictRegistry(ALGORITHM, _HEADER_NAMES)
    )
    own = Signature(key_id=key_id, protected=made["protected"], signature=made["signature"])
    signed = SignedBytes(payload=to_base64url(payload), signatures=(*beside, own))
    if (count := len(signed.signatures)) > MAX_SIGNERS or len(signed.as_text()) > MAX_TOKEN_BYTES:
        limits = f"{MAX_SIGNERS} signatures and {MAX_TOKEN_BYTES // 1024} KiB"
        raise invalid_field("signatures", f"the token cannot hold {count}: it has at most {limits}")
    return signed


def read_signed(text: str) -> SignedBytes:
    """Parses a JWS in JSON, plain or base64url.

    Raises MalformedToken, also for headers other than algorithm, key id and type, and for another algorithm or type.
    """
    if len(text) > MAX_TOKEN_BYTES or not text.isascii():
        raise MalformedToken(f"is larger than {MAX_TOKEN_BYTES // 1024} KiB or no ASCII")
    document = read_envelope(text.strip())
    payload, signatures = document.get("payload"), document.get("signatures")
    if document.keys() != {"payload", "signatures"} or not isinstance(payload, str):
        raise MalformedToken("is not a payload with signatures")
    if not isinstance(signatures, list) or not 0 < len(signatures) <= MAX_SIGNERS:
        raise MalformedToken(f"must have 1 to {MAX_SIGNERS} signatures")
    return SignedBytes(payload=payload, signatures=tuple(map(_read_signature, signatures)))


def is_signed_by(signed: SignedBytes, signature: Signature, key: OKPKey) -> bool:
    """Whether `signature` is a valid signature of the bytes by `key`."""
    value: Any = {"payload": signed.payload, "protected": signature.protected, "signature": signature.signature}
    try:
        jws.deserialize_json(value, key, registry=StrictRegistry(ALGORITHM, _HEADER_NAMES))
    except (JoseError, ValueError, TypeError):
        return False
    return True


def _read_signature(found: object) -> Signature:
    if not isinstance(found, dict) or found.keys() != {"protected", "signature"}:
        raise MalformedToken("has a signature that is more or less than a protected header and a signature")
    protected, signature = found["protected"], found["signature"]
    if not isinstance(protected, str) or not isinstance(signature, str) or len(protected) > MAX_HEADER_CHARS:
        raise MalformedToken("has a signature that cannot be read")
    header = read_object(from_base64url(protected))
    if header.keys() != _HEADER_NAMES or header["alg"] != ALGORITHM or header["typ"] != TYPE:
        raise MalformedToken(f"has a signature that is not {ALGORITHM} by key id, of type {TYPE}")
    key_id = header["kid"]
    if not isinstance(key_id, str) or not 0 < len(key_id) <= MAX_KEY_ID_CHARS:
        raise MalformedToken("has a signature without a key id")
    return Signature(key_id=key_id, protected=protected, signature=signature)


class StrictRegistry(jws.JWSRegistry):
    """Allows one algorithm and the given headers, so that no token can choose a key or a way to verify it."""

    def __init__(self, algorithm: str, headers: Collection[str]) -> None:
        super().__init__(algorithms=[algorithm])
        self._algorithm = algorithm
        self.header_registry = {name: self.header_registry[name] for name in sorted(headers)}

    @override
    def get_alg(self, name: str) -> Any:
        # Overridden because joserfc warns of the name EdDSA, but few libraries know the new one of RFC 9864.
        if name != self._algorithm:
            raise JoseError(f"{name!r} is not {self._algorithm}")
        return self.algorithms[name]
