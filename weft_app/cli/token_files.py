"""Files with tokens: written for their owner alone, read within a bound."""

import os
from contextlib import suppress
from pathlib import Path

from weft.kernel.errors import invalid_field
from weft.signing.strict_json import MAX_TOKEN_BYTES


def read_token_text(path: Path, field: str) -> str:
    """The text of a token. Raises INVALID_ARGUMENT naming `field`."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise invalid_field(field, f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_TOKEN_BYTES or not content.isascii():
        raise invalid_field(field, f"{path} is larger than {MAX_TOKEN_BYTES // 1024} KiB or is no text")
    return content.decode("ascii")


def write_token_text(path: Path, text: str, field: str) -> None:
    """Put `text` in place of the file in one step. Raises INVALID_ARGUMENT naming `field`."""
    if len(text) > MAX_TOKEN_BYTES:
        raise invalid_field(field, f"the token would be larger than {MAX_TOKEN_BYTES // 1024} KiB")
    fresh = path.with_name(f"{path.name}.new")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        fresh.replace(path)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink()
        raise invalid_field(field, f"{path} cannot be written: {error.strerror}") from error
