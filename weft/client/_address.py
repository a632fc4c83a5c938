"""Where the mesh is."""

import json
import os
from pathlib import Path

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

HOME_VARIABLE = "WEFT_HOME"
DEFAULT_HOME = Path("~/.weft")


def mesh_address(home: Path | str | None = None) -> str:
    """The gRPC target of the mesh that runs on a home (default: WEFT_HOME, then ~/.weft).

    Raises SERVICE_UNAVAILABLE when no `weft up` runs there.
    """
    folder = Path(home or os.environ.get(HOME_VARIABLE) or DEFAULT_HOME).expanduser()
    try:
        running = json.loads((folder / "run" / "up.json").read_text("utf-8"))
    except OSError as error:
        raise WeftError(
            Reason.SERVICE_UNAVAILABLE, f"no mesh runs on {folder}; start one with `weft up --home {folder}`"
        ) from error
    return str(running["grpc"])
