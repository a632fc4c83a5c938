"""Execs a program that dies with its parent: `python -I -S parent_death.py <parent pid> <program> <argument>...`.

A separate script, because setting the parent-death signal between fork and exec would run Python in a fork of a process
with gRPC threads. The signal survives exec. Standard library only.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Sets the parent-death signal, checks that the parent is alive, and execs the program."""
    parent, program = int(sys.argv[1]), sys.argv[2]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent died before the program was started")
    try:
        os.execvp(program, sys.argv[2:])  # noqa: S606 - an argument list, no shell
    except OSError as error:
        sys.exit(f"cannot run {program}: {error.strerror}")


if __name__ == "__main__":
    main()
