"""Addresses, credentials and channels of clients."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import grpc

from weft.client._home import CA_FILE_VARIABLE, KEY_VARIABLE, Service, mesh_address
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.rpc import CONNECTION_LOST, error_from_call, open_blocking_channel
from weft.kernel.tls import TlsFiles
from weft.kernel.tls_channel import ChannelSecurity

_VARIABLES = {
    "certificate_file": "WEFT_CERTIFICATE_FILE",
    "key_file": "WEFT_KEY_FILE",
    "ca_file": CA_FILE_VARIABLE,
}
"""Environment variables by field of `weft.kernel.tls.TlsFiles`."""
_SECTION = "environment"


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
