"""Ed25519 keys of signers: private ones in PEM files of their owners, public ones as the configuration has them."""

import os
from pathlib import Path

from joserfc.errors import JoseError
from joserfc.jwk import OKPKey

from weft.kernel.errors import invalid_field
from weft.signing.strict_json import MalformedToken, from_base64url

MAX_KEY_FILE_BYTES = 16 * 1024
PUBLIC_KEY_BYTES = 32
_CURVE = "Ed25519"


def new_key_file(path: Path, field: str) -> str:
    """Write a new private key to `path`, readable by its owner alone; returns the public key.

    Raises INVALID_ARGUMENT naming `field` when the file is there already, or cannot be written.
    """
    key = OKPKey.generate_key("Ed25519")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise invalid_field(field, f"{path} exists already; a key is never overwritten") from error
    except OSError as error:
        raise invalid_field(field, f"{path} cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(key.as_pem(private=True))
        file.flush()
        os.fsync(file.fileno())
    return public_text(key)


def read_private_key(path: Path, field: str) -> OKPKey:
    """The private key in a PEM file (PKCS 8, not encrypted). Raises INVALID_ARGUMENT naming `field`."""
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
    """A key's public half, base64url."""
    return str(key.as_dict(private=False)["x"])


def read_public_key(text: str, field: str) -> OKPKey:
    """The public key that `public_text` gave. Raises INVALID_ARGUMENT naming `field`."""
    try:
        if len(from_base64url(text)) != PUBLIC_KEY_BYTES:
            raise MalformedToken("has another length")
        return OKPKey.import_key({"kty": "OKP", "crv": _CURVE, "x": text.rstrip("=")})
    except (JoseError, ValueError) as error:
        raise invalid_field(
            field, "must be an Ed25519 public key in base64url, as `weft sign new-key` prints it"
        ) from error
