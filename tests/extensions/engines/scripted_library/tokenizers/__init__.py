"""A stand-in for the tokenizers library: each byte is a token, written as byte-level tokenizers do."""

import json
from pathlib import Path
from types import SimpleNamespace

SPECIAL = {"<s>": 256, "</s>": 257}


class Tokenizer:
    @classmethod
    def from_file(cls, path: str) -> "Tokenizer":
        assert json.loads(Path(path).read_text())["decoder"]["type"] == "ByteLevel"
        return cls()

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        ids = [SPECIAL["<s>"]] if add_special_tokens else []
        for number, piece in enumerate(text.split("<s>")):
            ids += ([SPECIAL["<s>"]] if number else []) + list(piece.encode())
        return SimpleNamespace(ids=ids, tokens=[self.id_to_token(number) for number in ids])

    def id_to_token(self, number: int) -> str | None:
        named = {place: name for name, place in SPECIAL.items()}
        return named.get(number) or (letter_of(number) if 0 <= number < 256 else None)


def letter_of(byte: int) -> str:
    """How byte-level tokenizers write a byte: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [other for other in range(256) if other not in printable].index(byte))
