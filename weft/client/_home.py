"""Where a client looks for the mesh of this machine."""

import os
import sys
from pathlib import Path

if sys.platform == "win32":
    from pathlib import WindowsPath as _NativePath
else:
    from pathlib import PosixPath as _NativePath

HOME_VARIABLE = "WEFT_HOME"


class FoundHome(_NativePath):
    """A home that no option and no argument names: that of WEFT_HOME, or the default one.

    Paths that are made of it are of this type, too. Variables with the address of a mesh go before such a home, and
    after one that is named.
    """


DEFAULT_HOME = FoundHome("~/.weft")


def home_folder(home: Path | str | None) -> Path:
    """Returns the absolute path of a home; None: that of WEFT_HOME, or the default one."""
    chosen = home or FoundHome(os.environ.get(HOME_VARIABLE) or DEFAULT_HOME)
    # Path(...) of a FoundHome is a plain path.
    return (chosen if isinstance(chosen, Path) else Path(chosen)).expanduser().absolute()
