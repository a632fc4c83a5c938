"""Faults of HTTP/1.1 requests without a complete response."""

import errno
import os
import socket
import ssl
from enum import Enum, auto


class HttpFaultError(Exception):
    """A request got no complete response. Contains neither an address nor data from the server."""


class Unconnected(Enum):
    """Why no connection was made."""

    TIMEOUT = auto()
    UNKNOWN_NAME = auto()
    UNTRUSTED = auto()
    """No TLS, or an untrusted certificate."""
    FORBIDDEN = auto()
    """An address that weft does not connect to."""
    SHORTAGE = auto()
    """This process cannot open any connection."""
    REFUSED = auto()
    """Anything else: the port is closed, the network is unreachable."""


_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of connect(2) and socket(2) with local causes."""


class UnconnectedError(HttpFaultError):
    """No connection was made."""

    def __init__(self, why: Unconnected, words: str = "") -> None:
        """`words`: the operating system's text; empty: unknown."""
        super().__init__(why.name)
        self.why = why
        self.words = words


class UnansweredError(HttpFaultError):
    """A connection ended before the first byte of a response."""


class BadHeadError(HttpFaultError):
    """The received data is not a valid HTTP/1.1 response head."""

    def __init__(self, *, is_long: bool = False) -> None:
        """`is_long`: the head exceeds a limit."""
        super().__init__("too long" if is_long else "unreadable")
        self.is_long = is_long


class BrokenAnswerError(HttpFaultError):
    """The connection ended within a body, or the framing is invalid."""


class ClosedClientError(HttpFaultError):
    """The client was closed."""


def unconnected(error: Exception) -> UnconnectedError:
    """Returns the fault for an exception while connecting."""
    match error:
        case TimeoutError():
            return UnconnectedError(Unconnected.TIMEOUT)
        case socket.gaierror():
            return UnconnectedError(Unconnected.UNKNOWN_NAME)
        case ssl.SSLError():
            return UnconnectedError(Unconnected.UNTRUSTED)
        case OSError(errno=int(number)) if number in _SHORTAGES:
            return UnconnectedError(Unconnected.SHORTAGE, os.strerror(number))
        case OSError(errno=int(number)):
            return UnconnectedError(Unconnected.REFUSED, os.strerror(number))
        case _:
            return UnconnectedError(Unconnected.REFUSED)
