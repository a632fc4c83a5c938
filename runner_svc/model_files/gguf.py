"""Reads GGUF headers, with limits on every count and length in the file.

Model files are untrusted, and readers of this format have been attacked through its counts and lengths. So every length
is compared with the rest of the file before it is used, arrays are skipped instead of read, and the position of each
tensor is checked. The file is read, not memory-mapped: a file that shrinks meanwhile must not crash this process.
"""

import io
import re
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from runner_svc.model_files.header import ModelHeader
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

BLOCKS: Mapping[int, tuple[int, int]] = MappingProxyType(
    {
        kind: (block_bytes, block_values)
        for block_values, kinds in (
            (1, {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2}),
            (32, {2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 9: 36, 20: 18, 39: 17}),
            (64, {40: 36, 42: 18}),
            (128, {41: 18}),
            (256, {10: 84, 11: 110, 12: 144, 13: 176, 14: 210, 15: 292, 16: 66, 17: 74, 18: 98, 19: 50}),
            (256, {21: 110, 22: 82, 23: 136, 29: 56, 34: 54, 35: 66}),
        )
        for kind, block_bytes in kinds.items()
    }
)
"""Bytes per block and values per block by tensor type."""
_UP_TO_BF16 = (
    "q8_0 q5_0 q5_1 q2_k q3_k_s q3_k_m q3_k_l q4_k_s q4_k_m q5_k_s q5_k_m q6_k iq2_xxs iq2_xs q2_k_s iq3_xs iq3_xxs "
    "iq1_s iq4_nl iq3_s iq3_m iq2_s iq2_m iq4_xs iq1_m bf16"
)
FILE_TYPES: Mapping[int, str] = MappingProxyType(
    {
        **dict(enumerate(["f32", "f16", "q4_0", "q4_1"])),
        **dict(enumerate(_UP_TO_BF16.split(), start=7)),
        **dict(enumerate(["tq1_0", "tq2_0", "mxfp4", "nvfp4", "q1_0", "q2_0"], start=36)),
    }
)
"""The type of most tensors in a file, by `general.file_type`."""
GUESSED_FILE_TYPE = 1024
"""Bit that marks a guessed type; the other bits are the type."""
MAGIC = b"GGUF"
MAX_ENTRIES = 16_384
"""Maximum number of entries: models have under a hundred; this many with maximum names take 18 MiB."""
MAX_TENSORS = 65_536
"""Maximum number of tensors: models have a few thousand; this many with maximum dimensions take half a second."""
MAX_NAME_BYTES = 256
"""Maximum length of a key or tensor name; the longest known ones have under 100 bytes."""
ENCODER = "bert"
"""Part of the names of encoder architectures, which produce vectors instead of text, such as `nomic-bert`."""
MAX_TEXT_BYTES = 1024 * 1024
"""Maximum length of a text that is kept, such as a chat template; longer values are skipped."""
MAX_SKIPPED_STRINGS = 8_388_608
"""Maximum number of skipped strings, which takes some seconds; the largest vocabularies have under a million."""
MAX_NAMED_TEMPLATES = 16
MAX_KEPT_BYTES = 20 * 1024 * 1024
"""Maximum memory of all kept texts: Python takes up to four bytes per character."""
MAX_LAYERS = 1024
MAX_LISTS = 16
"""Maximum number of kept per-layer lists; others are skipped."""
MAX_NUMBER = 2**31 - 1
"""Largest accepted count of a model; a larger one is ignored."""
MAX_DIMENSIONS = 4

VERSIONS = (2, 3)
"""Versions of the format that are read."""
_READ_BYTES = 1024 * 1024
_TEMPLATE = "tokenizer.chat_template"
_NAMED_TEMPLATE = _TEMPLATE + "."
_KEPT_TEXTS = frozenset({"general.architecture", "general.type", "adapter.type", _TEMPLATE})
_BY_LAYER = (".attention.head_count_kv", ".attention.head_count")
_TOKENS = "tokenizer.ggml.tokens"
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_PIECE_BYTES = 64 * 1024
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SIZES = {kind: struct.calcsize("<" + letter) for kind, letter in _FORMATS.items()}
_Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader(ModelHeader):
    """The facts in a GGUF header that weft uses. 0 and empty texts: not in the file."""

    architecture: str = ""
    chat_template: str | None = None
    named_templates: Mapping[str, str] = field(default_factory=dict)
    """Additional templates by name, such as `tool_use`."""
    bos_token: str = ""
    eos_token: str = ""
    file_type: int | None = None
    parameter_count: int = 0
    """Number of values in all tensors; 0: the type of one is unknown."""
    kind: str = ""
    """Content of the file: "model", "adapter", "mmproj"; empty: not stated."""
    adapter_kind: str = ""
    encodes_images: bool | None = None
    """Whether a projector encodes images; None: not stated."""
    encodes_audio: bool | None = None
    """Whether a projector encodes audio; None: not stated."""
    file_bytes: tuple[int, int] | None = None
    """Smallest and largest size of the file with its tensors; None: the type of one is unknown."""

    @property
    def quantization(self) -> str:
        """The type of most weights, such as "q4_k_m"; empty: unknown."""
        return "" if self.file_type is None else FILE_TYPES.get(self.file_type & ~GUESSED_FILE_TYPE, "")

    @property
    def templates(self) -> tuple[str, ...]:
        """All templates that an engine may choose."""
        own = () if self.chat_template is None else (self.chat_template,)
        return (*own, *self.named_templates.values())


def is_gguf(path: Path) -> bool:
    """Whether a file starts like a GGUF file. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads the header of a file; takes 0.01 s for a vocabulary of 50,000 tokens. Blocks: call it in a thread.

    Raises INVALID_ARGUMENT if the file is not GGUF, is truncated, or has impossible values. Raises OSError.
    """
    with path.open("rb", buffering=_READ_BYTES) as file:
        return _HeaderReader(file, path.stat().st_size).read()


class _HeaderReader:
    """One pass over the header of one file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._skipped_strings = 0
        self._templates = 0
        self._kept_bytes = 0
        self._lists: dict[str, tuple[int, ...]] = {}
        self._values: dict[str, _Value] = {}
        self._extent: tuple[int, int] | None = None
        self._tokens: tuple[int, int] | None = None
        """Offset of the tokens in the file, and their number."""

    def read(self) -> GgufHeader:
        if self._take(4) != MAGIC:
            raise broken_file("it does not start like one")
        version = self._number("I")
        if version not in VERSIONS:
            raise broken_file(f"version {version} is not known")
        tensor_count = self._bounded("Q", MAX_TENSORS, "tensors")
        keys: set[str] = set()
        for _ in range(self._bounded("Q", MAX_ENTRIES, "entries")):
            key = self._name()
            # Readers differ in which of two values they use.
            if key in keys:
                raise broken_file("it has a duplicate entry")
            keys.add(key)
            self._read_entry(key)
        weight_bytes, parameter_count = self._read_tensors(tensor_count)
        return self._header(tensor_count, weight_bytes, parameter_count)

    def _header(self, tensor_count: int, weight_bytes: int, parameter_count: int) -> GgufHeader:
        architecture = self._text("general.architecture")
        file_type = self._values.get("general.file_type")
        heads = max(self._by_layer(f"{architecture}.attention.head_count"), default=0)
        embedding_length = self._number_of(f"{architecture}.embedding_length")
        # The length of every head unless the file states another.
        usual_length = embedding_length // heads if heads else 0
        named = {
            key.removeprefix(_NAMED_TEMPLATE): value
            for key, value in self._values.items()
            if key.startswith(_NAMED_TEMPLATE) and isinstance(value, str)
        }
        return GgufHeader(
            architecture=architecture,
            context_tokens=self._number_of(f"{architecture}.context_length"),
            chat_template=self._text(_TEMPLATE) if _TEMPLATE in self._values else None,
            named_templates=named,
            bos_token=self._token("tokenizer.ggml.bos_token_id"),
            eos_token=self._token("tokenizer.ggml.eos_token_id"),
            tensor_count=tensor_count,
            weight_bytes=weight_bytes,
            parameter_count=parameter_count,
            file_type=file_type if isinstance(file_type, int) and 0 <= file_type <= MAX_NUMBER else None,
            layers=self._layers(),
            embedding_length=embedding_length,
            vocabulary=0 if ENCODER in architecture else self._vocabulary(architecture),
            heads=heads,
            kv_heads=self._by_layer(f"{architecture}.attention.head_count_kv")
            or self._by_layer(f"{architecture}.attention.head_count"),
            key_length=self._number_of(f"{architecture}.attention.key_length") or usual_length,
            value_length=self._number_of(f"{architecture}.attention.value_length") or usual_length,
            sliding_window=self._number_of(f"{architecture}.attention.sliding_window"),
            kind=self._word("general.type"),
            adapter_kind=self._word("adapter.type"),
            encodes_images=self._flag("clip.has_vision_encoder"),
            encodes_audio=self._flag("clip.has_audio_encoder"),
            file_bytes=self._extent,
        )

    def _layers(self) -> int:
        layers = self._number_of(f"{self._text('general.architecture')}.block_count")
        return layers if layers <= MAX_LAYERS else 0

    def _by_layer(self, key: str) -> tuple[int, ...]:
        """Returns a number for each layer, from a list or from one number for all; empty: the file has neither."""
        listed = self._lists.get(key)
        if listed is not None:
            fits = len(listed) == self._layers() and all(0 <= number <= MAX_NUMBER for number in listed)
            return listed if fits else ()
        one = self._number_of(key)
        return (one,) * self._layers() if one else ()

    def _vocabulary(self, architecture: str) -> int:
        return self._tokens[1] if self._tokens else self._number_of(f"{architecture}.vocab_size")

    def _number_of(self, key: str) -> int:
        """Returns a count; 0: missing, or out of range."""
        value = self._values.get(key)
        is_count = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_NUMBER
        return int(value) if is_count and value is not None else 0

    def _flag(self, key: str) -> bool | None:
        value = self._values.get(key)
        return value if isinstance(value, bool) else None

    def _word(self, key: str) -> str:
        """Returns a text; empty if it is missing or has another type."""
        value = self._values.get(key)
        return value if isinstance(value, str) else ""

    def _text(self, key: str) -> str:
        value = self._values.get(key, "")
        if not isinstance(value, str):
            raise broken_file("a text is of another type")
        return value

    def _token(self, key: str) -> str:
        """Returns the text of the token whose id is stored under `key`; empty: none."""
        number = self._values.get(key)
        if self._tokens is None or not isinstance(number, int):
            return ""
        begin, count = self._tokens
        if not 0 <= number < count:
            return ""
        self._file.seek(begin)
        self._skip_strings(number)
        return self._string(MAX_NAME_BYTES)

    def _read_entry(self, key: str) -> None:
        kind = self._number("I")
        if kind == _ARRAY:
            self._skip_array(key)
        elif kind == _STRING:
            if key in _KEPT_TEXTS or self._is_named_template(key):
                self._keep_text(key)
            else:
                self._skip(self._number("Q"))
        elif kind in _FORMATS:
            self._values[key] = self._number(_FORMATS[kind])
        else:
            raise broken_file(f"an entry has an unknown type: {kind}")

    def _keep_text(self, key: str) -> None:
        text = self._string(MAX_TEXT_BYTES)
        self._kept_bytes += sys.getsizeof(text)
        if self._kept_bytes > MAX_KEPT_BYTES:
            raise broken_file(f"its texts take more than {MAX_KEPT_BYTES} bytes")
        self._values[key] = text

    def _is_named_template(self, key: str) -> bool:
        """Whether the entry is a named template. Raises INVALID_ARGUMENT for too many of them, because all are kept."""
        if not key.startswith(_NAMED_TEMPLATE):
            return False
        self._templates += 1
        if self._templates > MAX_NAMED_TEMPLATES:
            raise broken_file(f"it has more than {MAX_NAMED_TEMPLATES} chat templates")
        return True

    def _skip_array(self, key: str) -> None:
        kind, count = self._number("I"), self._number("Q")
        if kind != _STRING:
            if kind not in _SIZES:
                raise broken_file(f"an array has the unknown type {kind}")
            if key.endswith(_BY_LAYER) and count <= MAX_LAYERS and len(self._lists) < MAX_LISTS:
                self._keep_list(key, kind, count)
            else:
                self._skip(count * _SIZES[kind])
            return
        self._skipped_strings += count
        # A string takes at least eight bytes.
        if self._skipped_strings > MAX_SKIPPED_STRINGS or count * 8 > self._left():
            raise broken_file("an array has too many items")
        if key == _TOKENS:
            self._tokens = self._file.tell(), count
        self._skip_strings(count)

    def _skip_strings(self, count: int) -> None:
        """Skips strings in blocks of the file: separate reads would take seconds."""
        read, unpack_from = self._file.read, _LENGTH.unpack_from
        piece, place = b"", 0
        while count:
            piece, place = piece[place:] + read(_PIECE_BYTES), 0
            last = len(piece) - _LENGTH.size
            if last < 0:
                raise _cut_short()
            while count and place <= last:
                place += _LENGTH.size + unpack_from(piece, place)[0]
                count -= 1
            if place > len(piece):
                self._skip(place - len(piece))
                piece, place = b"", 0
        self._file.seek(place - len(piece), io.SEEK_CUR)

    def _keep_list(self, key: str, kind: int, count: int) -> None:
        numbers = struct.unpack(f"<{count}{_FORMATS[kind]}", self._take(count * _SIZES[kind]))
        self._lists[key] = tuple(number if isinstance(number, int) else -1 for number in numbers)

    def _read_tensors(self, count: int) -> tuple[int, int]:
        """Returns the total size of all tensors, and the number of their values; 0: unknown.

        Raises INVALID_ARGUMENT for overlapping tensors and tensors outside the file, which have made readers access
        other memory.
        """
        alignment = self._values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 65_536:
            raise broken_file("its alignment is invalid")
        ends = total = all_values = 0
        are_all_known = True
        for _ in range(count):
            self._name()
            dimensions = [self._number("Q") for _ in range(self._bounded("I", MAX_DIMENSIONS, "dimensions"))]
            kind, offset = self._number("I"), self._number("Q")
            values = 1
            for dimension in dimensions:
                values *= dimension
            block_bytes, block_values = BLOCKS.get(kind, (0, 1))
            size = -(-values // block_values) * block_bytes
            ends, total, all_values = max(ends, offset + size), total + size, all_values + values
            are_all_known = are_all_known and kind in BLOCKS
        header_bytes = self._file.tell()
        begin = -(-header_bytes // alignment) * alignment
        if are_all_known:
            # Not every program pads the end.
            end = begin + -(-ends // alignment) * alignment
            self._extent = (begin + ends if count else header_bytes), end
        if count and begin + ends > self._size:
            raise broken_file("a tensor lies beyond its end")
        behind = max(0, self._size - begin)
        if total > behind:
            raise broken_file("its tensors overlap")
        return (total, all_values) if are_all_known else (behind, 0)

    def _name(self) -> str:
        return self._string(MAX_NAME_BYTES)

    def _string(self, limit: int) -> str:
        length = self._bounded("Q", limit, "bytes of one text")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise broken_file("a text is not UTF-8") from None

    def _bounded(self, letter: str, limit: int, what: str) -> int:
        number = self._number(letter)
        if number > limit:
            raise broken_file(f"it has more than {limit} {what}")
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
    return broken_file("it is truncated")


def broken_file(why: str) -> WeftError:
    """Returns the error for an unusable file."""
    return WeftError(Reason.INVALID_ARGUMENT, f"the model file is not a usable GGUF file: {why}")


MAX_PARTS = 512
"""Maximum number of files of a model; the largest known models have about a hundred."""
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def model_parts(path: Path) -> tuple[Path, ...]:
    """Returns the files of a split model, such as `m-00001-of-00003.gguf`, in order; otherwise the single file.

    Raises INVALID_ARGUMENT for a name with impossible numbers.
    """
    found = _PART.fullmatch(path.name)
    if found is None:
        return (path,)
    number, count = int(found["number"]), int(found["count"])
    if not 1 <= number <= count or count > MAX_PARTS:
        raise broken_file(f"its name says that it is part {number} of {count}; at most {MAX_PARTS} parts are supported")
    return tuple(path.with_name(f"{found['stem']}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1))


def read_gguf_model(path: Path) -> GgufHeader:
    """Reads the header of a model, with the weights of all its parts. Blocks: call it in a thread.

    Raises as `read_gguf_header`, and INVALID_ARGUMENT for a missing part.
    """
    parts = model_parts(path)
    if len(parts) == 1:
        return read_gguf_header(path)
    for number, part in enumerate(parts, start=1):
        if not part.is_file():
            raise broken_file(f"part {number} of {len(parts)} is missing")
    # Only the first part describes the model.
    first, *others = (read_gguf_header(part) for part in parts)
    return replace(
        first,
        weight_bytes=first.weight_bytes + sum(other.weight_bytes for other in others),
        tensor_count=first.tensor_count + sum(other.tensor_count for other in others),
        parameter_count=sum(part.parameter_count for part in (first, *others)),
    )
