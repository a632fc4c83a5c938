"""The demo model with one of its thirty layers: the real engine computes it in a thirtieth of the time.

Its words mean nothing. It is for tests of what an engine does with prompts, such as caching them, not of answers.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft_app.compose.demo import demo_model_path

_LAYERS = b"llama.block_count"
_UINT32, _STRING, _ARRAY = 4, 8, 9
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Of a value of each type of a fixed size."""
_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: bytes
    description: bytes
    """The number and the lengths of its dimensions, and its type."""
    offset: int


class _Reader:
    """Reads the head of a GGUF file from its beginning."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.place = 0

    def take(self, length: int) -> bytes:
        self.place += length
        return self.raw[self.place - length : self.place]

    def number(self, layout: str) -> int:
        (found,) = struct.unpack(layout, self.take(struct.calcsize(layout)))
        return int(found)

    def text(self) -> bytes:
        return self.take(self.number("<Q"))

    def skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self.text()
        elif kind == _ARRAY:
            of, length = self.number("<I"), self.number("<Q")
            if of in _BYTES:
                self.take(_BYTES[of] * length)
            else:
                for _ in range(length):
                    self.skip_value(of)
        else:
            self.take(_BYTES[kind])

    def entries(self, count: int) -> Iterator[bytes]:
        """Each entry as it is in the file, but for the number of layers, which becomes 1."""
        for _ in range(count):
            start = self.place
            key, kind = self.text(), self.number("<I")
            value = self.place
            self.skip_value(kind)
            if key == _LAYERS:
                assert kind == _UINT32
                yield self.raw[start:value] + struct.pack("<I", 1)
            else:
                yield self.raw[start : self.place]

    def tensors(self, count: int) -> Iterator[_Tensor]:
        for _ in range(count):
            name, start = self.text(), self.place
            self.take(8 * self.number("<I") + 4)
            yield _Tensor(name, self.raw[start : self.place], self.number("<Q"))


def write_shallow_model(path: Path) -> Path:
    """Writes the first layer of the demo model, with its words and all else that it has once."""
    reader = _Reader(demo_model_path().read_bytes())
    head, tensor_count, entry_count = reader.take(8), reader.number("<Q"), reader.number("<Q")
    entries = b"".join(reader.entries(entry_count))
    tensors = sorted(reader.tensors(tensor_count), key=lambda tensor: tensor.offset)
    begin = _aligned(reader.place)
    ends = [tensor.offset for tensor in tensors[1:]] + [len(reader.raw) - begin]
    infos, data = b"", b""
    kept = 0
    for tensor, end in zip(tensors, ends, strict=True):
        if not tensor.name.startswith(b"blk.") or tensor.name.startswith(b"blk.0."):
            infos += struct.pack("<Q", len(tensor.name)) + tensor.name + tensor.description
            infos += struct.pack("<Q", len(data))
            data += _padded(reader.raw[begin + tensor.offset : begin + end])
            kept += 1
    path.write_bytes(_padded(head + struct.pack("<QQ", kept, entry_count) + entries + infos) + data)
    return path


def _aligned(index: int) -> int:
    return -(-index // _ALIGNMENT) * _ALIGNMENT


def _padded(raw: bytes) -> bytes:
    return raw.ljust(_aligned(len(raw)), b"\0")
