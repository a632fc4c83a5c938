"""The pepper: the secret bytes that every key digest is made with, in a file of their own.

A stolen database alone cannot be used to check guesses of secrets. The file is as valuable as the database: without it
no key is valid.
"""

import hmac
import os
import secrets
import stat
from hashlib import sha256
from pathlib import Path

from weft.kernel.errors import WeftError, invalid_field

PEPPER_BYTES = 32
FIELD = "registry.keys.pepper_file"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MARK_TEXT = b"weft key pepper"


def read_pepper(path: Path) -> bytes | None:
    """The pepper; None when there is no file.

    Raises INVALID_ARGUMENT when others may read it, when it is of another length, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            pepper = file.read(PEPPER_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise invalid_field(FIELD, f"{path} cannot be read: {error.strerror}") from error
    if mode & _OTHERS:
        raise invalid_field(FIELD, f"{path} is open to others (mode {stat.S_IMODE(mode):04o}); run: chmod 600 {path}")
    if len(pepper) != PEPPER_BYTES:
        raise invalid_field(FIELD, f"{path} must hold exactly {PEPPER_BYTES} bytes; restore it from a backup")
    return pepper


def make_pepper(path: Path) -> bytes:
    """A new one, which is on disk when this returns. Raises INVALID_ARGUMENT when it cannot be written."""
    pepper = secrets.token_bytes(PEPPER_BYTES)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(pepper)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise invalid_field(FIELD, f"{path} cannot be written: {error.strerror}") from error
    return pepper


def pepper_mark(pepper: bytes) -> bytes:
    """Return the mark by which the database recognizes a pepper; it reveals nothing about the pepper."""
    return hmac.digest(pepper, _MARK_TEXT, sha256)


def lost_pepper(path: Path | None, *, keys: int) -> WeftError:
    """Why a registry with keys does not start without the pepper they were made with."""
    return invalid_field(
        FIELD,
        f"{path or 'it'} is not there, or is not what the {keys} API keys in the database were made with: none of them "
        "would work. Restore the file from a backup; if it is lost, set registry.keys.revoke_all_if_pepper_lost for "
        "one start, and make new keys",
    )


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
