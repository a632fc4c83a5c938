"""The bytes of a GGUF model file, part by part."""

import struct
from collections.abc import Iterable, Sequence
from typing import Any

UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 6, 7, 8, 9, 10
ALIGNMENT = 32
Value = str | float | Sequence[str] | Sequence[float]
"""A whole number is written as UINT32, also in a sequence."""


def text(words: str) -> bytes:
    raw = words.encode()
    return struct.pack("<Q", len(raw)) + raw


def raw_entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def entry(key: str, value: Value) -> bytes:
    if isinstance(value, str | float | int):
        return raw_entry(key, *_items([value]))
    kind, items = _items(value)
    return raw_entry(key, ARRAY, struct.pack("<IQ", kind, len(value)) + items)


def _items(values: Sequence[Any]) -> tuple[int, bytes]:
    match values[0]:
        case str():
            return STRING, b"".join(map(text, values))
        case bool():
            return BOOL, bytes(values)
        case int():
            return UINT32, struct.pack(f"<{len(values)}I", *values)
        case _:
            return FLOAT32, struct.pack(f"<{len(values)}f", *values)


def tensor(name: str, shape: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf(
    entries: Iterable[bytes] = (),
    tensors: Iterable[bytes] = (),
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: bytes = b"",
) -> bytes:
    entries, tensors = list(entries), list(tensors)
    tensor_count, entry_count = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, entry_count)
    return padded(head + b"".join([*entries, *tensors])) + data


def padded(raw: bytes) -> bytes:
    return raw.ljust(-(-len(raw) // ALIGNMENT) * ALIGNMENT, b"\0")
