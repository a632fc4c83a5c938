"""Channels for programs without an event loop, with what `weft.kernel.tls_channel` gives to the others."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc

from weft.kernel.tls import TlsSource
from weft.kernel.tls_check import TlsMaterial

Connect = Callable[[TlsMaterial], grpc.Channel]


class _Connection:
    """A channel and how many calls run on it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.calls = 0
        self._lock = threading.Lock()

    def enter(self) -> None:
        with self._lock:
            self.calls += 1

    def leave(self) -> None:
        with self._lock:
            self.calls -= 1


class SecuredSyncChannel(grpc.Channel):
    """The newest certificates for new calls; calls that have begun keep the connection that they have."""

    def __init__(self, source: TlsSource, connect: Connect, extra: tuple[tuple[str, str], ...], most: int) -> None:
        """`extra` is metadata of every call; at most `most` connections of earlier certificates are kept."""
        self._source = source
        self._connect = connect
        self._extra = extra
        self._most = most
        self._lock = threading.Lock()
        self._version, material = source.current()
        self._connection = _Connection(connect(material))
        self._retired: list[_Connection] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def enter(self) -> _Connection:
        """The connection for a call that begins; the call leaves it when it is over."""
        with self._lock:
            version, material = self._source.current()
            if version != self._version:
                self._version = version
                self._retired.append(self._connection)
                self._connection = _Connection(self._connect(material))
            self._close_idle()
            self._connection.enter()
            return self._connection

    def close(self) -> None:
        """See grpc.Channel."""
        with self._lock:
            retired, self._retired = self._retired, []
            for connection in (*retired, self._connection):
                connection.channel.close()

    def subscribe(self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool = False) -> None:
        """See grpc.Channel; of the connection of this moment."""
        self._connection.channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """See grpc.Channel."""
        self._connection.channel.unsubscribe(callback)

    def unary_unary(self, *names: Any, **keywords: Any) -> Any:
        """See grpc.Channel."""
        return _Method(self, "unary_unary", (names, keywords), self._extra)

    def unary_stream(self, *names: Any, **keywords: Any) -> Any:
        """See grpc.Channel."""
        return _Method(self, "unary_stream", (names, keywords), self._extra)

    def stream_unary(self, *names: Any, **keywords: Any) -> Any:
        """See grpc.Channel."""
        return _Method(self, "stream_unary", (names, keywords), self._extra)

    def stream_stream(self, *names: Any, **keywords: Any) -> Any:
        """See grpc.Channel."""
        return _Method(self, "stream_stream", (names, keywords), self._extra)

    def _close_idle(self) -> None:
        """Here rather than when a call ends: gRPC tells of that on a thread that must not close its own channel."""
        surplus = len(self._retired) - self._most
        ended = [one for number, one in enumerate(self._retired) if one.calls == 0 or number < surplus]
        self._retired = [one for one in self._retired if one not in ended]
        for connection in ended:
            connection.channel.close()


class _Method:
    """An rpc on whatever connection is the current one when it is called."""

    def __init__(
        self, channel: SecuredSyncChannel, kind: str, arguments: Any, extra: tuple[tuple[str, str], ...]
    ) -> None:
        self._channel = channel
        self._kind = kind
        self._arguments = arguments
        self._extra = extra

    def __call__(self, *arguments: Any, metadata: Any = None, **options: Any) -> Any:
        connection = self._channel.enter()
        is_left = False
        try:
            names, keywords = self._arguments
            method = getattr(connection.channel, self._kind)(*names, **keywords)
            metadata = (*(metadata or ()), *self._extra) or None
            answer = method(*arguments, metadata=metadata, **options)
            # A call that is over already takes no callback, and says so.
            is_left = self._kind.endswith("_stream") and answer.add_callback(connection.leave)
            return answer
        finally:
            if not is_left:
                connection.leave()
