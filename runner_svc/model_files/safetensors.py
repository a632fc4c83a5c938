"""Reads safetensors headers and the config.json beside them, with limits on every count and length.

A file starts with an eight-byte length and that much JSON about its tensors, of which only positions are read. A folder
has a `config.json` with the model's dimensions, and an index if there are several files.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from runner_svc.model_files.header import ModelHeader
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

SUFFIX = ".safetensors"
INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
MAX_HEADER_BYTES = 8 * 1024 * 1024
"""Maximum size of a header: the format allows 100 MB, but large models are split into files with under 1 MB."""
MAX_TENSORS = 32_768
"""Maximum number of tensors per file: this many, with the longest header, take 64 MiB."""
MAX_INDEX_BYTES = 32 * 1024 * 1024
"""Maximum size of an index; the largest known one has 9 MB."""
MAX_CONFIG_BYTES = 1024 * 1024
MAX_SHARDS = 1024
MAX_LAYERS = 1024
MAX_NUMBER = 2**31 - 1

_Kind = TypeVar("_Kind")
_LENGTH_BYTES = 8
_SHARD_NAME = re.compile(rb'"([A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors)"')


class _Tensor(msgspec.Struct):
    """The position of a tensor; the entry `__metadata__` is read as a tensor without one."""

    data_offsets: tuple[int, int] | None = None


class _Numbers(msgspec.Struct):
    """The fields of a config.json that weft uses. Values of other types count as missing."""

    num_hidden_layers: object = None
    num_attention_heads: object = None
    num_key_value_heads: object = None
    head_dim: object = None
    hidden_size: object = None
    vocab_size: object = None
    max_position_embeddings: object = None
    sliding_window: object = None


class _Config(_Numbers):
    text_config: _Numbers | None = None
    """Dimensions of a vision model's language part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsModel(ModelHeader):
    """The facts about a model that weft uses. 0: unknown."""

    file_bytes: int


def is_safetensors(path: Path) -> bool:
    """Whether the path is a safetensors file by name, or a folder with one. Raises OSError."""
    if path.is_dir():
        return any(path.glob(f"*{SUFFIX}"))
    return path.suffix == SUFFIX


def read_safetensors_model(path: Path) -> SafetensorsModel:
    """Reads the model of a folder, or of one file and the config.json beside it. Blocks: call it in a thread.

    Raises INVALID_ARGUMENT for malformed files. Raises OSError.
    """
    folder = path if path.is_dir() else path.parent
    shards = _shards(folder) if path.is_dir() else [path]
    weights = [_read_header(shard) for shard in shards]
    config = folder / CONFIG_NAME
    numbers = _numbers(_bounded(config, MAX_CONFIG_BYTES)) if config.is_file() else _Numbers()
    heads = _number(numbers.num_attention_heads)
    embedding_length, layers = _number(numbers.hidden_size), _number(numbers.num_hidden_layers)
    layers = layers if layers <= MAX_LAYERS else 0
    head_length = _number(numbers.head_dim) or (embedding_length // heads if heads else 0)
    return SafetensorsModel(
        weight_bytes=sum(size for size, _ in weights),
        tensor_count=sum(count for _, count in weights),
        file_bytes=sum(shard.stat().st_size for shard in shards),
        layers=layers,
        heads=heads,
        kv_heads=(_number(numbers.num_key_value_heads) or heads,) * layers,
        key_length=head_length,
        value_length=head_length,
        embedding_length=embedding_length,
        vocabulary=_number(numbers.vocab_size),
        context_tokens=_number(numbers.max_position_embeddings),
        sliding_window=_number(numbers.sliding_window),
    )


def require_whole_file(path: Path) -> None:
    """Raises INVALID_ARGUMENT unless the tensors of a file are all of its data. Raises OSError."""
    _read_header(path, whole=True)


def _shards(folder: Path) -> list[Path]:
    """Returns the files of the model in a folder.

    The index takes precedence: a folder may contain the same weights again in a single file.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        # Only file names are extracted: decoding the whole map could take a gigabyte.
        names: Iterable[str] = {name.decode() for name in _SHARD_NAME.findall(_bounded(index, MAX_INDEX_BYTES))}
    else:
        names = (path.name for path in folder.glob(f"*{SUFFIX}"))
    shards = [folder / name for name in sorted(names)]
    if not shards:
        raise _broken("the folder has none")
    if len(shards) > MAX_SHARDS:
        raise _broken(f"there are more than {MAX_SHARDS} files")
    missing = sum(not shard.is_file() for shard in shards)
    if missing:
        raise _broken(f"{missing} of {len(shards)} files are missing")
    return shards


def _read_header(path: Path, *, whole: bool = False) -> tuple[int, int]:
    """Returns the size of a file's weights, and the number of tensors. `whole`: they must be all of its data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(_LENGTH_BYTES)
        length = int.from_bytes(raw, "little")
        if len(raw) < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise _broken("it is truncated")
        if length > MAX_HEADER_BYTES:
            raise _broken(f"its header has more than {MAX_HEADER_BYTES} bytes")
        header = file.read(length)
    if len(header) < length:
        raise _broken("it is truncated")
    if header.count(b"{") > MAX_TENSORS + 2:
        raise _broken(f"it has more than {MAX_TENSORS} tensors")
    tensors = _decoded(header, dict[str, _Tensor])
    weights, count = _sum_of(tensors.values(), size - _LENGTH_BYTES - length)
    if whole and weights != size - _LENGTH_BYTES - length:
        raise _broken("its tensors are not all of its data")
    return weights, count


def _sum_of(tensors: Iterable[_Tensor], data_bytes: int) -> tuple[int, int]:
    total = count = 0
    for tensor in tensors:
        if tensor.data_offsets is None:
            continue
        begin, end = tensor.data_offsets
        if not 0 <= begin <= end <= data_bytes:
            raise _broken("a tensor lies beyond its end")
        total, count = total + end - begin, count + 1
    if total > data_bytes:
        raise _broken("its tensors overlap")
    return total, count


def _numbers(raw: bytes) -> _Numbers:
    config = _decoded(raw, _Config)
    return config.text_config or config


def _number(value: object) -> int:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_NUMBER
    return value if isinstance(value, int) and is_count else 0


def _bounded(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise _broken(f"{path.name} has more than {limit} bytes")
    return raw


def _decoded(raw: bytes, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise _broken("its JSON is invalid") from None


def _broken(why: str) -> WeftError:
    return WeftError(Reason.INVALID_ARGUMENT, f"the model has no usable safetensors files: {why}")
