"""The digest of a model file, computed off the event loop and cached until the file changes."""

import asyncio
import hashlib
from pathlib import Path

import msgspec

from weft.kernel.machine.file_replacement import replace_file
from weft.kernel.telemetry.log import get_logger

log = get_logger("weft.runner")

MAX_CACHE_BYTES = 1024 * 1024
CHUNK_BYTES = 4 * 1024 * 1024


async def model_digest(path: Path, cache: Path) -> str:
    """Returns `sha256:<hex>` of a file. `cache` is a JSON file of digests by path, size and modification time.

    Without a readable and writable cache, the digest is computed again. Raises OSError for `path`.
    """
    return await asyncio.to_thread(_digest, path, cache)


def _digest(path: Path, cache: Path) -> str:
    stat = path.stat()
    # A link may lead to a name that is not UTF-8.
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode(errors="backslashreplace").decode()
    known = _read(cache)
    if key not in known:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        known[key] = f"sha256:{digest.hexdigest()}"
        _write(cache, known)
    return known[key]


def _read(cache: Path) -> dict[str, str]:
    try:
        with cache.open("rb") as file:
            raw = file.read(MAX_CACHE_BYTES)
        # A larger file is truncated here, and then is not valid JSON.
        return msgspec.json.decode(raw, type=dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("digests cannot be read and are computed again", file=str(cache), why=str(error))
        return {}


def _write(cache: Path, known: dict[str, str]) -> None:
    try:
        replace_file(cache, msgspec.json.format(msgspec.json.encode(known), indent=1))
    except OSError as error:
        log.warning("digests cannot be kept", file=str(cache), why=error.strerror)
