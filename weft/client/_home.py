"""Discovery of a mesh: its home on this machine, and the addresses of its services. Imports no gRPC."""

import json
import os
import re
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NoReturn

from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.address import addresses_of

if sys.platform == "win32":
    from pathlib import WindowsPath as _NativePath
else:
    from pathlib import PosixPath as _NativePath

HOME_VARIABLE = "WEFT_HOME"
KEY_VARIABLE = "WEFT_API_KEY"
CA_FILE_VARIABLE = "WEFT_CA_FILE"


class FoundHome(_NativePath):
    """A home from WEFT_HOME or the default, not from an option or argument.

    Paths derived from it have this type, too. Variables with the address of a mesh take precedence over such a home,
    but not over a named one.
    """


DEFAULT_HOME = FoundHome("~/.weft")


def home_folder(home: Path | str | None) -> Path:
    """Returns the absolute path of a home, by default WEFT_HOME or DEFAULT_HOME.

    Raises PERMISSION_DENIED for one in which another user runs a mesh, such as /tmp/mesh; root may use it.
    """
    chosen = home or FoundHome(os.environ.get(HOME_VARIABLE) or DEFAULT_HOME)
    # Path(...) of a FoundHome is a plain path.
    folder = (chosen if isinstance(chosen, Path) else Path(chosen)).expanduser().absolute()
    with suppress(OSError):
        run = (folder / "run").stat()
        if hasattr(os, "geteuid") and os.geteuid() and run.st_uid not in (os.geteuid(), 0):
            what = f"the home {folder} belongs to another user, whose programs would get keys and prompts"
            raise WeftError(Reason.PERMISSION_DENIED, f"{what}; choose another with --home")
    return folder


Service = Literal["router", "registry"]
MAX_ADDRESS_CHARS = 2048
URL_VARIABLE = "WEFT_URL"
"""Environment variable with the base URL of a remote mesh's HTTP API."""
_BASE = re.compile(r"https?://(\[[^]/?#@\s]+\]|[^:/?#@\s]+)(:[0-9]{1,5})?/?")
ADDRESS_VARIABLES: Mapping[Service, str] = MappingProxyType({"router": "WEFT_ROUTER", "registry": "WEFT_REGISTRY"})
"""Environment variables with the gRPC addresses of a remote mesh's services, comma-separated."""


def mesh_url(home: Path | str | None = None) -> str:
    """Returns the base URL of a mesh's HTTP API, from WEFT_URL or a home, in the order of `mesh_address`.

    A home has it in the file of `weft up` or of a `weft serve gateway`. Raises SERVICE_UNAVAILABLE if there is none,
    INVALID_ARGUMENT if WEFT_URL is invalid.
    """
    folder = home_folder(home)
    if elsewhere := _variable(URL_VARIABLE, folder):
        return require_url(elsewhere)
    is_killed = bool(address := _fact(folder, "grpc")) and not _unless_dead(address)
    own = "" if is_killed else _fact(folder, "url")
    return own or _served(folder, "gateway") or _no_gateway(folder)


def require_url(url: str) -> str:
    """Returns `url`. Raises INVALID_ARGUMENT unless it is the base URL of an HTTP API."""
    if _BASE.fullmatch(url) is None:
        shown = url.rpartition("@")[2][:200]
        raise invalid_field(URL_VARIABLE, f"must be http:// or https:// with a host, and no user or path: {shown!r}")
    return url


def require_key(key: str) -> str:
    """Returns `key`, which may be empty. Raises INVALID_ARGUMENT unless it can be an API key."""
    if not key.isascii() or not key.isprintable() or " " in key:
        raise invalid_field(KEY_VARIABLE, "is not a key: it contains invalid characters")
    return key


def _no_gateway(folder: Path) -> NoReturn:
    """Raises SERVICE_UNAVAILABLE for a home without a gateway, on which other services of the mesh may run."""
    others = (_serving(folder, service) or _configured(folder, service) for service in ADDRESS_VARIABLES)
    if not any(others):
        _missing(folder, URL_VARIABLE)
    raise WeftError(
        Reason.SERVICE_UNAVAILABLE,
        f"the HTTP address of the mesh is not known: no gateway runs on the home {folder}, where other services of it "
        f"do; name the address in {URL_VARIABLE}",
    )


def mesh_ca_file(url: str, home: Path | str | None = None) -> Path | None:
    """Returns the file of PEM roots that an HTTPS client of `url` trusts; None: the system's.

    WEFT_CA_FILE takes precedence over the certificate that the mesh on this home has created for that URL.
    """
    if named := os.environ.get(CA_FILE_VARIABLE):
        return Path(named).expanduser()
    folder = home_folder(home)
    file = _fact(folder, "caFile")
    return Path(file) if file and _fact(folder, "url") == url else None


def mesh_address(home: Path | str | None = None, service: Service = "router") -> str:
    """Returns the gRPC target of a service, the first that exists.

    1. a named home: what runs on it, as in 3 and 4;
    2. WEFT_ROUTER or WEFT_REGISTRY;
    3. what runs on the home of WEFT_HOME or ~/.weft: from the file of `weft up`, or the file or socket of a
       `weft serve` of this service, followed by its other configured addresses and its owner's, since it may be a
       standby;
    4. the address that is configured (`addresses` of weft.yaml, or an option) for another `weft serve` on that home.

    A `FoundHome` is not named. Raises SERVICE_UNAVAILABLE, listing what was tried, if none exists.
    """
    folder = home_folder(home)
    variable = ADDRESS_VARIABLES[service]
    return (
        _variable(variable, folder)
        or _unless_dead(_fact(folder, "grpc"))
        or _serving(folder, service)
        or _configured(folder, service)
        or _missing(folder, variable)
    )


def _variable(variable: str, folder: Path) -> str:
    """Returns the address in an environment variable; empty for a named home, which takes precedence."""
    return os.environ.get(variable, "").strip().rstrip("/") if isinstance(folder, FoundHome) else ""


def _fact(folder: Path, name: str) -> str:
    """Returns a value from the file of `weft up` on a home; empty if there is none."""
    try:
        return str(json.loads((folder / "run" / "up.json").read_text("utf-8"))[name] or "")
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _served(folder: Path, service: str) -> str:
    """Returns the address in the file of a `weft serve` on a home; empty if there is none."""
    return _written(folder / "run" / f"{service}.address")


def _serving(folder: Path, service: Service) -> str:
    """Returns the address of a `weft serve` on a home, and of its peers; empty if there is none."""
    found = _served(folder, service) or _socket(folder, service)
    if not found:
        return ""
    others = (_written(folder / "run" / name) for name in (f"{service}.{service}-target", f"{service}.owner"))
    return ",".join(dict.fromkeys(each for text in (found, *others) if text for each in addresses_of(text)))


def _written(file: Path) -> str:
    """Returns the address in a file; empty if there is none."""
    try:
        with file.open(encoding="utf-8") as opened:
            return opened.read(MAX_ADDRESS_CHARS).strip()
    except (OSError, ValueError):
        return ""


def _socket(folder: Path, service: str) -> str:
    return _unless_dead(f"unix:{folder / 'run' / f'{service}.sock'}")


def _unless_dead(address: str) -> str:
    """Returns the address; empty if it is a Unix socket on which no program listens."""
    scheme, _, path = address.partition(":")
    return "" if scheme == "unix" and not is_served(Path(path)) else address


def is_served(path: Path) -> bool:
    """Whether a program listens on a Unix socket; a killed program leaves the file."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (BlockingIOError, PermissionError):
            return True  # a busy one, or one of another user
        except OSError:
            return False
    return True


def _configured(folder: Path, service: Service) -> str:
    """Returns a service's address from the configuration of another `weft serve` on a home; empty if there is none."""
    for file in sorted((folder / "run").glob(f"*.{service}-target")):
        if found := _written(file):
            return found
    return ""


def _missing(folder: Path, variable: str) -> NoReturn:
    """Raises SERVICE_UNAVAILABLE with the next step; the variable is ignored if a home is named."""
    if isinstance(folder, FoundHome):
        step = f"`weft up`, or set {variable} to the address of a mesh elsewhere"
    else:
        is_ignored = bool(os.environ.get(variable))
        step = f"`weft up --home {folder}`" + (f"; {variable} is ignored, as a home is named" if is_ignored else "")
    raise WeftError(Reason.SERVICE_UNAVAILABLE, f"weft is not running (home {folder}); start it with {step}")
