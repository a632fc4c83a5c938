"""The digest of a model file, computed off the event loop and remembered while the file stays the same."""

import asyncio
import hashlib
from pathlib import Path

import msgspec

from weft.kernel.file_replacement import replace_file
from weft.kernel.log import get_logger

log = get_logger("weft.runner")

MAX_MEMORY_BYTES = 1024 * 1024
CHUNK_BYTES = 4 * 1024 * 1024


async def model_digest(path: Path, memory: Path) -> str:
    """`sha256:<hex>` of the file at `path`; `memory` is a JSON file of digests by path, size and time of change.

    A memory that cannot be read or written costs the time to compute digests again. Raises OSError for `path`.
    """
    return await asyncio.to_thread(_digest, path, memory)


def _digest(path: Path, memory: Path) -> str:
    stat = path.stat()
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    known = _read(memory)
    if key not in known:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        known[key] = f"sha256:{digest.hexdigest()}"
        _write(memory, known)
    return known[key]


def _read(memory: Path) -> dict[str, str]:
    try:
        with memory.open("rb") as file:
            raw = file.read(MAX_MEMORY_BYTES)
        # One that is longer is cut off here, and then is no JSON.
        return msgspec.json.decode(raw, type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("digests cannot be read and are computed again", file=str(memory), why=str(error))
        return {}


def _write(memory: Path, known: dict[str, str]) -> None:
    try:
        replace_file(memory, msgspec.json.format(msgspec.json.encode(known), indent=1))
    except OSError as error:
        log.warning("digests cannot be kept", file=str(memory), why=error.strerror)
