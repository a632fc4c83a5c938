"""Where a client looks for the mesh of this machine."""

from pathlib import Path

HOME_VARIABLE = "WEFT_HOME"
DEFAULT_HOME = Path("~/.weft")
