"""Identifiers that need no coordination."""

import secrets


def new_id(prefix: str) -> str:
    """A fresh id such as `req-9f2c...`: the prefix says what it names, 96 random bits make it unique."""
    return f"{prefix}-{secrets.token_hex(12)}"


def new_key() -> bytes:
    """A fresh symmetric key: 32 random bytes."""
    return secrets.token_bytes(32)
