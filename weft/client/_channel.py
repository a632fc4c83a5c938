"""Addresses, credentials and channels of clients."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, ClassVar, Literal, NoReturn, Self

import grpc

from weft.client._home import FoundHome, home_folder
from weft.kernel.address import addresses_of
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.rpc import CONNECTION_LOST, error_from_call, open_blocking_channel
from weft.kernel.tls import TlsFiles
from weft.kernel.tls_channel import ChannelSecurity

Service = Literal["router", "registry"]
MAX_ADDRESS_CHARS = 2048
URL_VARIABLE = "WEFT_URL"
"""Environment variable with the base URL of the HTTP API of a remote mesh."""
_BASE = re.compile(r"https?://[^/?#\s]+/?")
ADDRESS_VARIABLES: Mapping[Service, str] = MappingProxyType({"router": "WEFT_ROUTER", "registry": "WEFT_REGISTRY"})
"""Environment variables with the gRPC address of a service of a remote mesh; several with commas between them."""


def mesh_url(home: Path | str | None = None) -> str:
    """Returns the base URL of the HTTP API of a mesh, in the order of `mesh_address`, with WEFT_URL.

    On a home it is from the file of `weft up`, or that of a `weft serve gateway`. Raises SERVICE_UNAVAILABLE where
    there is none, INVALID_ARGUMENT for a variable that is no such URL.
    """
    folder = home_folder(home)
    if elsewhere := _variable(URL_VARIABLE, folder):
        return require_url(elsewhere)
    return _fact(folder, "url") or _served(folder, "gateway") or _no_gateway(folder)


def require_url(url: str) -> str:
    """Returns the base URL of an HTTP API. Raises INVALID_ARGUMENT where it is none."""
    if _BASE.fullmatch(url) is None:
        raise invalid_field(URL_VARIABLE, f"must be http:// or https:// with a host, and no path: {url[:200]!r}")
    return url


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
    """Returns the PEM roots that an HTTPS client of the mesh at `url` trusts; None: the system's.

    WEFT_CA_FILE comes first, then the certificate that the mesh on this home has made for that URL.
    """
    if named := os.environ.get(_VARIABLES["ca_file"]):
        return Path(named).expanduser()
    folder = home_folder(home)
    file = _fact(folder, "caFile")
    return Path(file) if file and _fact(folder, "url") == url else None


def mesh_address(home: Path | str | None = None, service: Service = "router") -> str:
    """Returns the gRPC target of a service of a mesh: the first that there is, in this order.

    1. a named home: what runs on it, as in 3 and 4;
    2. WEFT_ROUTER or WEFT_REGISTRY;
    3. what runs on the home of WEFT_HOME, or else on ~/.weft: from the file of `weft up`, or the file or the socket
       of a `weft serve` of this service. It may be a standby: the other addresses of its configuration, and the owner's
       that it knows, come after its own, and calls go to the one that serves;
    4. the address that is configured (`addresses` of weft.yaml, or an option) for another `weft serve` on that home.

    A `FoundHome` is not named. Raises SERVICE_UNAVAILABLE, naming what was tried, when there is none of these.
    """
    folder = home_folder(home)
    variable = ADDRESS_VARIABLES[service]
    return (
        _variable(variable, folder)
        or _fact(folder, "grpc")
        or _serving(folder, service)
        or _configured(folder, service)
        or _missing(folder, variable)
    )


def _variable(variable: str, folder: Path) -> str:
    """Returns the address in an environment variable; empty for a named home, which goes before it."""
    return os.environ.get(variable, "").strip().rstrip("/") if isinstance(folder, FoundHome) else ""


def _fact(folder: Path, name: str) -> str:
    """Returns a fact that the `weft up` of a home has written; empty: none."""
    try:
        return str(json.loads((folder / "run" / "up.json").read_text("utf-8"))[name] or "")
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _served(folder: Path, service: str) -> str:
    """Returns the address that a `weft serve` of a service on a home has written; empty: none."""
    return _written(folder / "run" / f"{service}.address")


def _serving(folder: Path, service: Service) -> str:
    """Returns where a `weft serve` of a service on a home serves, and those beside it; empty: none."""
    found = _served(folder, service) or _socket(folder, service)
    if not found:
        return ""
    others = (_written(folder / "run" / name) for name in (f"{service}.{service}-target", f"{service}.owner"))
    return ",".join(dict.fromkeys(each for text in (found, *others) if text for each in addresses_of(text)))


def _written(file: Path) -> str:
    """Returns the address in a file of a home; empty: none."""
    try:
        with file.open(encoding="utf-8") as opened:
            return opened.read(MAX_ADDRESS_CHARS).strip()
    except (OSError, ValueError):
        return ""


def _socket(folder: Path, service: str) -> str:
    socket = folder / "run" / f"{service}.sock"
    return f"unix:{socket}" if socket.exists() else ""


def _configured(folder: Path, service: Service) -> str:
    """Returns the address of a service that is configured for a `weft serve` of another one on a home; empty: none."""
    for file in sorted((folder / "run").glob(f"*.{service}-target")):
        if found := _written(file):
            return found
    return ""


def _missing(folder: Path, variable: str) -> NoReturn:
    """Raises SERVICE_UNAVAILABLE naming what was tried: the variable, and the files of the home."""
    if isinstance(folder, FoundHome):
        tried = f"{variable} is not set, and no"
    else:
        tried = f"{variable} does not count where a home is named, and no" if os.environ.get(variable) else "no"
    raise WeftError(
        Reason.SERVICE_UNAVAILABLE,
        f"weft is not running (home {folder}): {tried} `weft up` or `weft serve` of this home names an address; "
        f"start it with `weft up --home {folder}`, or name the mesh in {variable}",
    )


_VARIABLES = {
    "certificate_file": "WEFT_CERTIFICATE_FILE",
    "key_file": "WEFT_KEY_FILE",
    "ca_file": "WEFT_CA_FILE",
}
"""Environment variables by field of `weft.kernel.tls.TlsFiles`."""
_SECTION = "environment"
KEY_VARIABLE = "WEFT_API_KEY"


def security_from(environment: Mapping[str, str]) -> ChannelSecurity:
    """Reads the environment: WEFT_CA_FILE, WEFT_CERTIFICATE_FILE and WEFT_KEY_FILE, each the path of a PEM file.

    WEFT_API_KEY is sent with every call. Raises INVALID_ARGUMENT for an invalid key.
    """
    given = {name: environment.get(variable) or "" for name, variable in _VARIABLES.items()}
    paths = {name: Path(text).expanduser() for name, text in given.items() if text}
    key = environment.get(KEY_VARIABLE, "").strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise invalid_field(KEY_VARIABLE, "is no key: it has characters that no key has")
    return ChannelSecurity(files=TlsFiles(section=_SECTION, **paths), api_key=key)


def security_with(api_key: str | None) -> ChannelSecurity:
    """Reads the environment; `api_key` replaces WEFT_API_KEY."""
    environment = os.environ if api_key is None else {**os.environ, KEY_VARIABLE: api_key}
    return security_from(environment)


def open_mesh_channel(target: str, security: ChannelSecurity | None = None) -> grpc.Channel:
    """Opens a channel to a service of a mesh; without `security` as the environment says.

    Raises INVALID_ARGUMENT naming the variable of an invalid file.
    """
    try:
        return open_blocking_channel(target, security or security_from(os.environ))
    except FieldError as error:
        raise named_by_variable(error) from error


def named_by_variable(error: FieldError) -> FieldError:
    """Returns the error with the environment variable of the setting that it names; other errors unchanged."""
    section, _, name = error.field.partition(".")
    if section != _SECTION:
        return error
    return FieldError(_VARIABLES[name], error.message.removeprefix(f"{error.field}: "), error.reason)


class ServiceClient:
    """Base of the synchronous clients: a channel to one service. Every failure is a WeftError with a reason."""

    def __init__(self, target: str, timeout_seconds: float | None, security: ChannelSecurity | None = None) -> None:
        """`timeout_seconds` of a call; None: none. Without `security` as the environment says."""
        self._target = target
        self._timeout_seconds = timeout_seconds
        self._channel = open_mesh_channel(target, security)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the channel; calls still running are cancelled."""
        self._channel.close()

    def _call(self, method: Callable[..., Any], request: Any, timeout_seconds: float | None = None) -> Any:
        try:
            return method(request, timeout=timeout_seconds or self._timeout_seconds)
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def _stream(self, call: Any) -> Iterator[Any]:
        """Yields the responses of a started call, which is cancelled when the reader leaves."""
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._failure(error) from error
        finally:
            call.cancel()

    def _failure(self, error: grpc.RpcError) -> WeftError:
        found = error_from_call(error, Reason.SERVICE_UNAVAILABLE)
        if found.message == CONNECTION_LOST:
            found.message = f"the mesh at {self._target} does not answer: {CONNECTION_LOST}"
        return found


class MeshServiceClient(ServiceClient):
    """Base of the clients of one service of a mesh, which are found by its home."""

    service: ClassVar[Service] = "router"
    """The service that is called."""
    call_timeout_seconds: ClassVar[float] = 10.0
    """Timeout of a call."""

    def __init__(self, target: str, timeout_seconds: float | None = None) -> None:
        """`timeout_seconds` of a call; None: `call_timeout_seconds`."""
        super().__init__(target, self.call_timeout_seconds if timeout_seconds is None else timeout_seconds)

    @classmethod
    def connect(
        cls, target: str | None = None, *, home: Path | str | None = None, timeout_seconds: float | None = None
    ) -> Self:
        """Connects to the service at a gRPC target, or of the mesh that runs on `home`.

        Raises SERVICE_UNAVAILABLE when none runs.
        """
        return cls(target or mesh_address(home, cls.service), timeout_seconds)


def registry_failure(error: grpc.RpcError, target: str) -> WeftError:
    """The failure of a call to the registry; one without an answer names the target."""
    found = error_from_call(error, Reason.SERVICE_UNAVAILABLE)
    if found.reason is not Reason.SERVICE_UNAVAILABLE:
        return found
    return WeftError(found.reason, f"the mesh at {target} does not answer: {found.message}")
