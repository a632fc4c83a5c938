"""Encryption of secrets with the keys in a file: AES-256-GCM, with each value bound to its name and version.

A database row only decrypts under its name and version, so that rows cannot be exchanged.
"""

import base64
import binascii
import secrets
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from registry_svc.store.owner_file import create_owner_file, read_owner_file
from weft.kernel.errors.error_tree import invalid_field

KEY_BYTES = 32
NONCE_BYTES = 12
KEY_ID_CHARS = 16
MAX_KEYS = 16
"""Maximum keys in a file: the current one and earlier ones."""
MAX_FILE_BYTES = 4_096
SETTING = "registry.secrets.key_file"


class UnreadableSecretError(Exception):
    """A value that no key decrypts."""


class SecretCipher:
    """Encrypts with the first key, and decrypts with all."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._keys = {key_id_of(key): key for key in keys}

    @property
    def key_id(self) -> str:
        """Id of the key that encrypts; empty without keys."""
        return next(iter(self._keys), "")

    def has_key(self, key_id: str) -> bool:
        """Whether it decrypts what was encrypted with the key of this id."""
        return key_id in self._keys

    def seal(self, name: str, version: int, value: str) -> bytes:
        """Returns a nonce with the value, encrypted and authenticated with the key `key_id`. There must be a key."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - most meshes have no secrets

        nonce = secrets.token_bytes(NONCE_BYTES)
        data = AESGCM(self._keys[self.key_id]).encrypt(nonce, value.encode(), _bound_to(name, version))
        return nonce + data

    def open(self, name: str, version: int, key_id: str, sealed: bytes) -> str:
        """Decrypts a value. Raises UnreadableSecretError."""
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - as in `seal`
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415

        key = self._keys.get(key_id)
        if key is None:
            raise UnreadableSecretError
        nonce, data = sealed[:NONCE_BYTES], sealed[NONCE_BYTES:]
        try:
            return AESGCM(key).decrypt(nonce, data, _bound_to(name, version)).decode()
        except (InvalidTag, ValueError) as error:
            raise UnreadableSecretError from error


def key_id_of(key: bytes) -> str:
    """Returns the id of a key, which does not reveal the key."""
    return sha256(b"weft secret key\0" + key).hexdigest()[:KEY_ID_CHARS]


def read_keys(path: Path) -> tuple[bytes, ...]:
    """Returns the keys in a file; empty if there is no file. Raises INVALID_ARGUMENT naming the setting."""
    content = read_owner_file(path, SETTING, max_bytes=MAX_FILE_BYTES)
    if content is None:
        return ()
    lines = [line for line in content.splitlines() if line.strip()]
    keys = tuple(key for line in lines if (key := _key_of(line)) is not None)
    if len(keys) < len(lines) or not 1 <= len(keys) <= MAX_KEYS or len(content) > MAX_FILE_BYTES:
        raise invalid_field(
            SETTING,
            f"{path} must hold 1 to {MAX_KEYS} lines, each of {KEY_BYTES} random bytes in base64 "
            f"(openssl rand -base64 {KEY_BYTES}); restore it from a backup",
        )
    return keys


def make_keys(path: Path) -> tuple[bytes, ...]:
    """Writes a file with one new key to disk, unless there is one; returns its keys. Raises as `read_keys`."""
    create_owner_file(path, base64.b64encode(secrets.token_bytes(KEY_BYTES)) + b"\n", SETTING)
    return read_keys(path)


def _key_of(line: bytes) -> bytes | None:
    try:
        key = base64.b64decode(line.strip(), validate=True)
    except binascii.Error:
        return None
    return key if len(key) == KEY_BYTES else None


def _bound_to(name: str, version: int) -> bytes:
    return f"weft secret v1\0{name}\0{version}".encode()
