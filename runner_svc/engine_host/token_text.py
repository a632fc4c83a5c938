"""The bytes of a token, from the token strings of a `tokenizer.json`. Pure."""

import re
from collections.abc import Collection, Iterator
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
"""How SentencePiece writes a space."""


class TokenBytes:
    """Translates token strings to their bytes, as the tokenizer's decoder would."""

    def __init__(self, tokenizer: dict[str, Any]) -> None:
        """`tokenizer`: the content of a `tokenizer.json`."""
        self._is_byte_level = "ByteLevel" in set(_types(tokenizer.get("decoder")))
        self._bytes = _byte_level_alphabet()
        self._as_they_are: Collection[str] = {
            str(token.get("content")) for token in tokenizer.get("added_tokens") or () if isinstance(token, dict)
        }

    def of(self, token: str) -> bytes:
        """Returns the bytes of a token; special tokens are their own text."""
        if token in self._as_they_are:
            return token.encode()
        if self._is_byte_level:
            return b"".join(
                bytes((self._bytes[letter],)) if letter in self._bytes else letter.encode() for letter in token
            )
        if (byte := _BYTE.fullmatch(token)) is not None:
            return bytes((int(byte[1], 16),))
        return token.replace(_SPACE, " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the byte of each letter of byte-level tokenizers: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _types(decoder: object) -> Iterator[str]:
    """Yields the kinds of a decoder and those within it."""
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for inner in decoder.get("decoders") or ():
            yield from _types(inner)
