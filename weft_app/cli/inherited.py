"""Repairs what a process inherits: standard streams, their encoding, HOME, and the working folder."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_NO_HOME = "~"
_ROOT = "/"
"""HOME of a user without an entry in the user database, as container runtimes set it."""
_STREAMS = ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w"))
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR})
"""Errors of a path that the user gave."""
_EXIT_FAILED = 1
_NO_USER = "Could not determine home directory."
"""Message of `Path.expanduser` for a path such as `~models/m.gguf`."""
_NO_TEXT = "surrogates not allowed"
"""Reason of an error about text with other bytes, which Python keeps as surrogates."""


def make_usable() -> None:
    """Replaces closed standard streams by /dev/null, and sets HOME if neither it nor the user database has one.

    Otherwise the next opened file or socket would get the descriptor of a closed stream. In a locale without UTF-8 the
    program restarts in Python's UTF-8 mode: SQLite and gRPC encode paths as UTF-8.
    """
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.utf8_mode:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - its own arguments
    for descriptor, name, mode in _STREAMS:
        _open(descriptor, name, mode)
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        # PYTHONIOENCODING may select an encoding without characters of names and output.
        with suppress(AttributeError, ValueError):
            stream.reconfigure(errors=errors)  # type: ignore[union-attr]
    # Without an entry for the user, expanduser returns its argument.
    if os.path.expanduser(_NO_HOME) == _NO_HOME:  # noqa: PTH111 - Path.expanduser raises
        os.environ["HOME"] = _ROOT


def _open(descriptor: int, name: str, mode: str) -> None:
    try:
        os.fstat(descriptor)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != descriptor:
            os.dup2(opened, descriptor)
            os.close(opened)
        os.set_inheritable(descriptor, True)
    if getattr(sys, name) is None:
        setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", errors="backslashreplace", closefd=False))


def has_working_folder() -> bool:
    """Whether the working folder exists."""
    try:
        os.getcwd()  # noqa: PTH109 - only checks that it exists
    except FileNotFoundError:
        return False
    return True


def leave_deleted_folder(folder: str | os.PathLike[str]) -> None:
    """Changes to `folder` if the working folder was deleted: libraries look it up."""
    if not has_working_folder():
        os.chdir(folder)


@contextmanager
def failures_of_system_in_one_line() -> Iterator[None]:
    """Ends the program with one line if its output cannot be written, or a path or argument cannot be used."""
    try:
        yield
        sys.stdout.flush()
    except (OSError, RuntimeError, UnicodeEncodeError) as error:
        if not (words := _words_of(error)):
            raise
        _end(words)
    except SystemExit:
        # Otherwise the interpreter would report the failure with a traceback and its own exit code.
        try:
            sys.stdout.flush()
        except OSError as error:
            _end(f"the output cannot be written: {error.strerror}")
        raise


def _words_of(error: OSError | RuntimeError | UnicodeEncodeError) -> str:
    """Returns the line for a failure; empty: it is none of the system, or of what the user gave."""
    if isinstance(error, UnicodeEncodeError):
        return "an argument or a name is not UTF-8 text" if error.reason == _NO_TEXT else ""
    if isinstance(error, RuntimeError):
        unknown = "a path starts with ~ and an unknown user; the own home is ~/ and a path in it"
        return unknown if str(error) == _NO_USER else ""
    if isinstance(error, FileNotFoundError) and not has_working_folder():
        return "the working directory was deleted: change to another one, or use absolute paths"
    if error.errno in _FULL:
        where = f"{error.filename}: " if error.filename else "the output cannot be written: "
        return f"{where}{error.strerror}; free some space, or write elsewhere"
    return f"{error.filename}: {error.strerror}" if error.errno in _REFUSED and error.filename else ""


def _end(text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"weft: {text}\n")
        sys.stderr.flush()
    # Buffered output would fail again when the interpreter ends.
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - see the module of the command line: few imports
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                os.dup2(nowhere.fileno(), stream.fileno())
    raise SystemExit(_EXIT_FAILED) from None
