"""What was typed into `weft chat`, kept under the home for the next time."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_HISTORY_LINES = 1000
HISTORY_NAME = "chat_history"


@contextmanager
def prompt_history(home: Path) -> Iterator[None]:
    """Line editing with the lines of earlier chats; without readline, or a folder to keep them in, plain input."""
    try:
        import readline  # noqa: PLC0415 - not there on every Python
    except ImportError:
        yield
        return
    file = home.expanduser().absolute() / "state" / HISTORY_NAME
    readline.clear_history()
    readline.set_auto_history(True)
    with suppress(OSError):
        readline.read_history_file(file)
    try:
        yield
    finally:
        readline.set_history_length(MAX_HISTORY_LINES)
        # What people type is theirs alone.
        with suppress(OSError):
            file.touch(mode=0o600)
            readline.write_history_file(file)
