"""The digest of a model file, computed off the event loop and remembered while the file stays the same."""

import asyncio
import hashlib
import json
from pathlib import Path

CHUNK_BYTES = 4 * 1024 * 1024


async def model_digest(path: Path, memory: Path) -> str:
    """`sha256:<hex>` of the file at `path`; `memory` is a JSON file of digests by path, size and time of change."""
    return await asyncio.to_thread(_digest, path, memory)


def _digest(path: Path, memory: Path) -> str:
    stat = path.stat()
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    known: dict[str, str] = json.loads(memory.read_text("utf-8")) if memory.exists() else {}
    if key not in known:
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        known[key] = f"sha256:{digest.hexdigest()}"
        memory.parent.mkdir(parents=True, exist_ok=True)
        memory.write_text(json.dumps(known, indent=1), "utf-8")
    return known[key]
