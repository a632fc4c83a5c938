"""Paths of model files on the command line, which may be written without `./`."""

from pathlib import Path

GGUF = ".gguf"


def existing_path(text: str) -> Path | None:
    """Returns the whole path of a model's file or folder that a text names; None: it names none that is there."""
    try:
        path = Path(text).expanduser()
        # A bare word may be a name as well: only a file that cannot be anything else is one.
        is_model = path.exists() if "/" in text else path.suffix.lower() == GGUF and path.is_file()
        return path.absolute() if is_model else None
    except (OSError, RuntimeError, ValueError):
        return None


def with_marked_path(text: str) -> str:
    """Returns a source, with `./` before a relative path that is there."""
    if text.startswith(("/", ".", "~")) or existing_path(text) is None:
        return text
    return f"./{text}"
