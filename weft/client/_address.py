"""Where the mesh is."""

import json
import os
from pathlib import Path
from typing import Literal

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

HOME_VARIABLE = "WEFT_HOME"
DEFAULT_HOME = Path("~/.weft")
URL_VARIABLE = "WEFT_URL"
"""Variable with the base URL of the HTTP surface of a mesh that runs elsewhere."""
ADDRESS_VARIABLES = {"router": "WEFT_ROUTER", "registry": "WEFT_REGISTRY"}
"""Variables with the gRPC address of a service, for a mesh that runs elsewhere."""


def mesh_url(home: Path | str | None = None) -> str:
    """The base URL of the HTTP surface of the mesh that runs on a home; see `mesh_address`.

    Where nobody has chosen a home, WEFT_URL comes first. Raises SERVICE_UNAVAILABLE when there is none.
    """
    folder = _folder(home)
    elsewhere = os.environ.get(URL_VARIABLE)
    if elsewhere and folder == DEFAULT_HOME.expanduser().absolute():
        return elsewhere.rstrip("/")
    try:
        return str(json.loads((folder / "run" / "up.json").read_text("utf-8"))["url"])
    except (OSError, ValueError, KeyError, TypeError):
        raise WeftError(
            Reason.SERVICE_UNAVAILABLE,
            f"no mesh runs on {folder}; start one with `weft up --home {folder}`, or name one in {URL_VARIABLE}",
        ) from None


def mesh_address(home: Path | str | None = None, service: Literal["router", "registry"] = "router") -> str:
    """The gRPC target of a service of the mesh that runs on a home (default: WEFT_HOME, then ~/.weft).

    It is the one that `weft up` wrote down, or the socket of a `weft serve` on the same home. Where nobody has chosen a
    home, WEFT_ROUTER or WEFT_REGISTRY comes first. Raises SERVICE_UNAVAILABLE when there is none of these.
    """
    folder = _folder(home)
    elsewhere = os.environ.get(ADDRESS_VARIABLES[service])
    if elsewhere and folder == DEFAULT_HOME.expanduser().absolute():
        return elsewhere
    try:
        return str(json.loads((folder / "run" / "up.json").read_text("utf-8"))["grpc"])
    except (OSError, ValueError, KeyError, TypeError):
        socket = folder / "run" / f"{service}.sock"
    if not socket.exists():
        raise WeftError(
            Reason.SERVICE_UNAVAILABLE, f"no mesh runs on {folder}; start one with `weft up --home {folder}`"
        )
    return f"unix:{socket}"


def _folder(home: Path | str | None) -> Path:
    return Path(home or os.environ.get(HOME_VARIABLE) or DEFAULT_HOME).expanduser().absolute()
