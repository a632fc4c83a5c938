"""Addresses, credentials and channels of clients."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import grpc

from weft.client._home import CA_FILE_VARIABLE, KEY_VARIABLE, require_key
from weft.kernel.channels.rpc import CONNECTION_LOST, error_from_call, open_blocking_channel
from weft.kernel.channels.tls import TlsFiles
from weft.kernel.channels.tls_channel import ChannelSecurity
from weft.kernel.errors.error_tree import ENGINE_CAUSE, FieldError, WeftError
from weft.kernel.errors.reasons import Reason

_VARIABLES = {
    "certificate_file": "WEFT_CERTIFICATE_FILE",
    "key_file": "WEFT_KEY_FILE",
    "ca_file": CA_FILE_VARIABLE,
}
"""Environment variables by field of `weft.kernel.channels.tls.TlsFiles`."""
_SECTION = "environment"


def security_from(environment: Mapping[str, str]) -> ChannelSecurity:
    """Returns the PEM files of WEFT_CA_FILE, WEFT_CERTIFICATE_FILE and WEFT_KEY_FILE, and the key of WEFT_API_KEY.

    Raises INVALID_ARGUMENT for an invalid key.
    """
    given = {name: environment.get(variable) or "" for name, variable in _VARIABLES.items()}
    paths = {name: Path(text).expanduser() for name, text in given.items() if text}
    key = require_key(environment.get(KEY_VARIABLE, "").strip())
    return ChannelSecurity(files=TlsFiles(section=_SECTION, **paths), api_key=key)


def security_with(api_key: str | None) -> ChannelSecurity:
    """Returns the security of the environment; `api_key` replaces WEFT_API_KEY."""
    environment = os.environ if api_key is None else {**os.environ, KEY_VARIABLE: api_key}
    return security_from(environment)


def open_mesh_channel(target: str, security: ChannelSecurity | None = None) -> grpc.Channel:
    """Opens a channel to a service of a mesh. `security` defaults to that of the environment.

    Raises INVALID_ARGUMENT naming the variable of an invalid file.
    """
    try:
        return open_blocking_channel(target, security or security_from(os.environ))
    except FieldError as error:
        raise named_by_variable(error) from error


def named_by_variable(error: FieldError) -> FieldError:
    """Returns the error with the name of the environment variable in place of the setting; other errors unchanged."""
    section, _, name = error.field.partition(".")
    if section != _SECTION:
        return error
    return FieldError(_VARIABLES[name], error.message.removeprefix(f"{error.field}: "), error.reason)


class ServiceClient:
    """Base of the synchronous clients: a channel to one service. Every failure is a WeftError with a reason."""

    def __init__(self, target: str, timeout_seconds: float | None, security: ChannelSecurity | None = None) -> None:
        """`timeout_seconds` applies to each call; None: no timeout. `security` defaults to that of the environment."""
        self._target = target
        self._timeout_seconds = timeout_seconds
        self._channel = open_mesh_channel(target, security)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel and cancels running calls."""
        self._channel.close()

    def _call(self, method: Callable[..., Any], request: Any, timeout_seconds: float | None = None) -> Any:
        try:
            seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
            return method(request, timeout=seconds)
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def _stream(self, call: Any) -> Iterator[Any]:
        """Yields the responses of a call, and cancels it when the reader stops."""
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._failure(error) from error
        finally:
            call.cancel()

    def _failure(self, error: grpc.RpcError) -> WeftError:
        found = error_from_call(error, Reason.SERVICE_UNAVAILABLE)
        # The caller may have an engine's words in its tracebacks, unlike services.
        found.metadata.pop(ENGINE_CAUSE, None)
        if found.message == CONNECTION_LOST:
            found.message = f"the mesh at {self._target} does not answer: {CONNECTION_LOST}"
        return found


def registry_failure(error: grpc.RpcError, target: str) -> WeftError:
    """Returns the error of a failed call to the registry; it names the target if the registry did not answer."""
    found = error_from_call(error, Reason.SERVICE_UNAVAILABLE)
    if found.reason is not Reason.SERVICE_UNAVAILABLE:
        return found
    return WeftError(found.reason, f"the mesh at {target} does not answer: {found.message}")
