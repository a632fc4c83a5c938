"""What the head of a GGUF file says, read with bounds on everything the file could lie about.

A model file may come from anybody, and readers of this format have been attacked through its counts and lengths. So
every length is held against what is left of the file before it is used, arrays are stepped over rather than read, and
each place of a tensor is checked. The file is read, not mapped: one that shrinks meanwhile must not end this process.
"""

import io
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

MAGIC = b"GGUF"
MAX_ENTRIES = 65_536
MAX_TENSORS = 1_048_576
MAX_NAME_BYTES = 256
"""Of a key or a tensor; the longest known ones have under 100."""
MAX_TEXT_BYTES = 1024 * 1024
"""Of a value that is wanted, such as a chat template; others are stepped over."""
MAX_STEPS = 8_388_608
"""Strings that are stepped over one by one, in all: some seconds. The largest vocabularies have under a million."""
MAX_NAMED_TEMPLATES = 16
MAX_DIMENSIONS = 4

_VERSIONS = (2, 3)
_READ_BYTES = 1024 * 1024
_TEMPLATE = "tokenizer.chat_template"
_NAMED_TEMPLATE = _TEMPLATE + "."
_TOKENS = "tokenizer.ggml.tokens"
_STRING, _ARRAY = 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SIZES = {kind: struct.calcsize("<" + letter) for kind, letter in _FORMATS.items()}
# Bytes per block and values per block of the tensor types in use; of others only the place is checked.
_BLOCKS = {
    kind: (block_bytes, block_values)
    for block_values, kinds in (
        (1, {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2}),
        (32, {2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 9: 36}),
        (256, {10: 84, 11: 110, 12: 144, 13: 176, 14: 210, 15: 292}),
    )
    for kind, block_bytes in kinds.items()
}
_Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What weft wants to know of a model file. Numbers that are 0 and texts that are empty are not in the file."""

    architecture: str = ""
    context_tokens: int = 0
    """What the model was trained for."""
    chat_template: str | None = None
    named_templates: Mapping[str, str] = field(default_factory=dict)
    """Further templates by name, such as `tool_use`."""
    bos_token: str = ""
    eos_token: str = ""
    tensor_count: int = 0

    @property
    def templates(self) -> tuple[str, ...]:
        """Every template that an engine may choose."""
        own = () if self.chat_template is None else (self.chat_template,)
        return (*own, *self.named_templates.values())


def is_gguf(path: Path) -> bool:
    """Whether the file says that it is one. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf_header(path: Path) -> GgufHeader:
    """The header of a file, in 0.1 s for a vocabulary of 50,000 tokens. Blocks: call it in a thread.

    Raises INVALID_ARGUMENT for a file that is no GGUF file, is cut short, or says what cannot be. Raises OSError.
    """
    with path.open("rb", buffering=_READ_BYTES) as file:
        return _HeaderReader(file, path.stat().st_size).read()


class _HeaderReader:
    """One pass over the head of one file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._steps = 0
        self._templates = 0
        self._values: dict[str, _Value] = {}
        self._tokens: tuple[int, int] | None = None
        """Where the array of tokens begins, and how many there are."""

    def read(self) -> GgufHeader:
        if self._take(4) != MAGIC:
            raise _broken("it does not begin as one")
        version = self._number("I")
        if version not in _VERSIONS:
            raise _broken(f"version {version} is not known")
        tensor_count = self._bounded("Q", MAX_TENSORS, "tensors")
        keys: set[str] = set()
        for _ in range(self._bounded("Q", MAX_ENTRIES, "entries")):
            key = self._name()
            # Two readers of one file must not see two different values.
            if key in keys:
                raise _broken("an entry comes twice")
            keys.add(key)
            self._read_entry(key)
        self._check_tensors(tensor_count)
        return self._header(tensor_count)

    def _header(self, tensor_count: int) -> GgufHeader:
        architecture = self._text("general.architecture")
        context = self._values.get(f"{architecture}.context_length", 0)
        named = {
            key.removeprefix(_NAMED_TEMPLATE): value
            for key, value in self._values.items()
            if key.startswith(_NAMED_TEMPLATE) and isinstance(value, str)
        }
        return GgufHeader(
            architecture=architecture,
            context_tokens=context if isinstance(context, int) and context > 0 else 0,
            chat_template=self._text(_TEMPLATE) if _TEMPLATE in self._values else None,
            named_templates=named,
            bos_token=self._token("tokenizer.ggml.bos_token_id"),
            eos_token=self._token("tokenizer.ggml.eos_token_id"),
            tensor_count=tensor_count,
        )

    def _text(self, key: str) -> str:
        value = self._values.get(key, "")
        if not isinstance(value, str):
            raise _broken("a text is of another type")
        return value

    def _token(self, key: str) -> str:
        """The text of the token whose id is under `key`; empty when there is none."""
        number = self._values.get(key)
        if self._tokens is None or not isinstance(number, int):
            return ""
        begin, count = self._tokens
        if not 0 <= number < count:
            return ""
        self._file.seek(begin)
        for _ in range(number):
            self._skip(self._number("Q"))
        return self._string(MAX_NAME_BYTES)

    def _read_entry(self, key: str) -> None:
        kind = self._number("I")
        if kind == _ARRAY:
            self._skip_array(key)
        elif kind == _STRING:
            if key in ("general.architecture", _TEMPLATE) or self._is_named_template(key):
                self._values[key] = self._string(MAX_TEXT_BYTES)
            else:
                self._skip(self._number("Q"))
        elif kind in _FORMATS:
            self._values[key] = self._number(_FORMATS[kind])
        else:
            raise _broken(f"an entry has the unknown type {kind}")

    def _is_named_template(self, key: str) -> bool:
        """Whether the entry is one of the named templates; each is kept, so there must not be many."""
        if not key.startswith(_NAMED_TEMPLATE):
            return False
        self._templates += 1
        if self._templates > MAX_NAMED_TEMPLATES:
            raise _broken(f"it has more than {MAX_NAMED_TEMPLATES} chat templates")
        return True

    def _skip_array(self, key: str) -> None:
        kind, count = self._number("I"), self._number("Q")
        if kind != _STRING:
            if kind not in _SIZES:
                raise _broken(f"an array has the unknown type {kind}")
            self._skip(count * _SIZES[kind])
            return
        if key == _TOKENS:
            self._tokens = (self._file.tell(), count)
        self._steps += count
        # A string takes eight bytes at least.
        if self._steps > MAX_STEPS or count * 8 > self._left():
            raise _broken("an array has more items than can be")
        read, seek, unpack, size = self._file.read, self._file.seek, struct.Struct("<Q").unpack, self._size
        for _ in range(count):
            raw = read(8)
            if len(raw) < 8 or (length := unpack(raw)[0]) > size:
                raise _cut_short()
            seek(length, io.SEEK_CUR)
        self._left()

    def _check_tensors(self, count: int) -> None:
        """Every tensor lies in the file. What does not is how readers of this format were made to read elsewhere."""
        alignment = self._values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 65_536:
            raise _broken("its alignment cannot be")
        ends = 0
        for _ in range(count):
            self._name()
            dimensions = [self._number("Q") for _ in range(self._bounded("I", MAX_DIMENSIONS, "dimensions"))]
            kind, offset = self._number("I"), self._number("Q")
            values = 1
            for dimension in dimensions:
                values *= dimension
            block_bytes, block_values = _BLOCKS.get(kind, (0, 1))
            ends = max(ends, offset + -(-values // block_values) * block_bytes)
        begin = -(-self._file.tell() // alignment) * alignment
        if count and begin + ends > self._size:
            raise _broken("a tensor lies beyond its end")

    def _name(self) -> str:
        return self._string(MAX_NAME_BYTES)

    def _string(self, limit: int) -> str:
        length = self._bounded("Q", limit, "bytes of one text")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise _broken("a text is not UTF-8") from None

    def _bounded(self, letter: str, limit: int, what: str) -> int:
        number = self._number(letter)
        if number > limit:
            raise _broken(f"it has more than {limit} {what}")
        return number

    def _number(self, letter: str) -> int:
        layout = "<" + letter
        value: int = struct.unpack(layout, self._take(struct.calcsize(layout)))[0]
        return value

    def _take(self, count: int) -> bytes:
        taken = self._file.read(count)
        if len(taken) < count:
            raise _cut_short()
        return taken

    def _skip(self, count: int) -> None:
        if count > self._left():
            raise _cut_short()
        self._file.seek(count, io.SEEK_CUR)

    def _left(self) -> int:
        left = self._size - self._file.tell()
        if left < 0:
            raise _cut_short()
        return left


def _cut_short() -> WeftError:
    return _broken("it is cut short")


def _broken(why: str) -> WeftError:
    return WeftError(Reason.INVALID_ARGUMENT, f"the model file is not a GGUF file that can be used: {why}")
