"""Removes a secret from the arguments that the process list shows to other users of the machine."""

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

_ARGUMENTS = Path("/proc/self/cmdline")
_STATUS = Path("/proc/self/stat")
_START_FIELD = 45
"""Index of `arg_start`, the address of the arguments, among the fields after the program's name."""
_HIDDEN = b"*"


def hide_argument(secret: str) -> bool:
    """Overwrites a secret in this process's arguments. Returns whether none of them contains it any more.

    Only Linux permits it. `sys.argv` stays as it is.
    """
    wanted = secret.encode()
    if not wanted or not sys.platform.startswith("linux"):
        return not any(secret in argument for argument in sys.argv)
    with suppress(OSError, ValueError, IndexError):
        shown = _ARGUMENTS.read_bytes()
        # The name of the program, which is before the last parenthesis, may contain spaces.
        fields = _STATUS.read_text("utf-8", "replace").rpartition(")")[2].split()
        start = int(fields[_START_FIELD])
        at = shown.find(wanted)
        while start and at >= 0:
            ctypes.memset(start + at, ord(_HIDDEN), len(wanted))
            at = shown.find(wanted, at + len(wanted))
    with suppress(OSError):
        return wanted not in _ARGUMENTS.read_bytes()
    return False
