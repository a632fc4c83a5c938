"""The ways in which a request over HTTP/1.1 gets no complete answer."""

import errno
import os
import socket
import ssl
from enum import Enum, auto


class HttpFaultError(Exception):
    """A request got no complete answer. Carries nothing of what the server sent, and no address."""


class Unconnected(Enum):
    """Why no connection was made."""

    TIMEOUT = auto()
    UNKNOWN_NAME = auto()
    UNTRUSTED = auto()
    """No TLS, or a certificate that is not trusted."""
    SHORTAGE = auto()
    """This process can open no connection at all now."""
    REFUSED = auto()
    """Anything else: nothing listens, the network is not reached."""


_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of connect(2) and socket(2) that say nothing about the server."""


class UnconnectedError(HttpFaultError):
    """No connection was made."""

    def __init__(self, why: Unconnected, words: str = "") -> None:
        """`words`: those of the operating system for a shortage."""
        super().__init__(why.name)
        self.why = why
        self.words = words


class UnansweredError(HttpFaultError):
    """An established connection ended before a byte of an answer."""


class BadHeadError(HttpFaultError):
    """What came is no head of an HTTP/1.1 answer, or a part of one."""

    def __init__(self, *, is_long: bool = False) -> None:
        """`is_long`: the head is beyond a limit."""
        super().__init__("too long" if is_long else "unreadable")
        self.is_long = is_long


class BrokenAnswerError(HttpFaultError):
    """The connection ended in the middle of a body, or its framing is wrong."""


class ClosedClientError(HttpFaultError):
    """The client was closed."""


def unconnected(error: Exception) -> UnconnectedError:
    """Returns the fault of an attempt to connect that raised `error`."""
    match error:
        case TimeoutError():
            return UnconnectedError(Unconnected.TIMEOUT)
        case socket.gaierror():
            return UnconnectedError(Unconnected.UNKNOWN_NAME)
        case ssl.SSLError():
            return UnconnectedError(Unconnected.UNTRUSTED)
        case OSError(errno=int(number)) if number in _SHORTAGES:
            return UnconnectedError(Unconnected.SHORTAGE, os.strerror(number))
        case _:
            return UnconnectedError(Unconnected.REFUSED)
