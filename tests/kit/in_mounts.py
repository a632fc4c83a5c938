"""Runs `weft` in separate mounts: `python -m kit.in_mounts SCRIPT HOME python -m weft_app.cli.main ...`.

The shell script SCRIPT creates them, with HOME as `$0`.
"""

import ctypes
import subprocess
import sys

from weft_app.cli.main import app

_CLONE_NEWNS = 0x20000


def main() -> None:
    """Creates a mount namespace like `unshare --mount`, then runs `weft`."""
    script, home = sys.argv[1:3]
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["sh", "-c", script, home], check=True)
    sys.argv = ["weft", *sys.argv[6:]]
    app()


if __name__ == "__main__":
    main()
