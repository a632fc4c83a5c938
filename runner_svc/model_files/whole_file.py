"""Whether a model file is whole, by its own header."""

from pathlib import Path

from runner_svc.model_files.gguf import MAGIC, VERSIONS, broken_file, read_gguf_header
from runner_svc.model_files.safetensors import SUFFIX, require_whole_file


def require_whole(path: Path, name: str) -> bool:
    """Checks that the tensors in a file's header account for all of it. Returns whether they do; False: unknown.

    `name` is the file's own name, since `path` may be a partial file. It is unknown for other kinds of files, later
    versions of GGUF, and tensors of unknown types. Blocks. Raises INVALID_ARGUMENT and OSError.
    """
    if name.endswith(SUFFIX):
        require_whole_file(path)
        return True
    with path.open("rb") as file:
        begins = file.read(len(MAGIC) + 4)
    if not begins.startswith(MAGIC) or (
        len(begins) == len(MAGIC) + 4 and int.from_bytes(begins[len(MAGIC) :], "little") not in VERSIONS
    ):
        return False
    extent, size = read_gguf_header(path).file_bytes, path.stat().st_size
    if extent is None:
        return False
    least, most = extent
    if not least <= size <= most:
        raise broken_file(f"it has {size} bytes, and its tensors end at {least}")
    return True
