"""The encryption of secrets, and the file with its keys."""

import base64
from pathlib import Path

import pytest

from registry_svc.secrets.cipher import (
    KEY_BYTES,
    MAX_KEYS,
    SecretCipher,
    UnreadableSecretError,
    key_id_of,
    make_keys,
    read_keys,
)
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

OLD, NEW = b"o" * KEY_BYTES, b"n" * KEY_BYTES
LINE = base64.b64encode(NEW) + b"\n"
VALUE = "sk-canary-0123456789"


def test_value_is_decrypted_with_its_key_and_absent_from_the_sealed_bytes() -> None:
    cipher = SecretCipher([OLD])
    sealed = cipher.seal("provider", 3, VALUE)
    assert cipher.open("provider", 3, cipher.key_id, sealed) == VALUE
    assert VALUE.encode() not in sealed
    assert VALUE not in repr(sealed)
    assert cipher.seal("provider", 3, VALUE) != sealed, "a nonce of its own each time"


def test_first_key_encrypts_and_every_key_decrypts() -> None:
    sealed = SecretCipher([OLD]).seal("provider", 1, VALUE)
    both = SecretCipher([NEW, OLD])
    assert both.open("provider", 1, key_id_of(OLD), sealed) == VALUE
    assert both.key_id == key_id_of(NEW) != key_id_of(OLD)


@pytest.mark.parametrize(("name", "version"), [("other", 1), ("provider", 2)])
def test_value_under_another_name_or_version_is_refused(name: str, version: int) -> None:
    cipher = SecretCipher([OLD])
    sealed = cipher.seal("provider", 1, VALUE)
    with pytest.raises(UnreadableSecretError):
        cipher.open(name, version, cipher.key_id, sealed)


def test_changed_bytes_and_an_unknown_key_are_refused() -> None:
    cipher = SecretCipher([OLD])
    sealed = cipher.seal("provider", 1, VALUE)
    changed = bytearray(sealed)
    changed[-1] ^= 1
    for key_id, broken in ((cipher.key_id, bytes(changed)), (cipher.key_id, b""), ("x", sealed)):
        with pytest.raises(UnreadableSecretError):
            cipher.open("provider", 1, key_id, broken)


def test_key_file_is_created_for_its_owner_only_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "state" / "secret-keys"
    assert read_keys(path) == ()
    keys = make_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_keys(path) == keys
    path.write_bytes(base64.b64encode(NEW) + b"\n\n" + path.read_bytes())
    assert read_keys(path) == (NEW, *keys)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not base64!\n",
        base64.b64encode(b"short"),
        LINE * (MAX_KEYS + 1),
        b"\n" * 5_000,
    ],
)
def test_damaged_key_file_is_refused_with_its_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret-keys"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(WeftError, match="secret-keys must hold") as failure:
        read_keys(path)
    assert failure.value.reason is Reason.INVALID_ARGUMENT


def test_key_file_readable_by_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret-keys"
    make_keys(path)
    path.chmod(0o640)
    with pytest.raises(WeftError, match="chmod 600"):
        read_keys(path)
