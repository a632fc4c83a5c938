"""Client channels with authentication, whose certificates follow their files."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
from typing_extensions import override

from weft.kernel.address import needs_tls, without_tls
from weft.kernel.log import get_logger
from weft.kernel.tls import TlsFiles, TlsMaterial, TlsSource

ChannelOptions = Sequence[tuple[str, int | str]]
KEY_HEADER = "authorization"
MAX_RETIRED = 8
"""Connections of earlier certificates that still carry calls; the oldest beyond that is cut."""

log = get_logger("weft.tls")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSecurity:
    """A caller's credentials and trust roots. The address says whether TLS is used (`weft.kernel.address`)."""

    files: TlsFiles = field(default_factory=TlsFiles)
    api_key: str = field(default="", repr=False)
    """Sent as a Bearer token with every call: within TLS, or to this machine alone. Empty: none."""
    reload_interval_seconds: float = 5.0
    """Minimum time between checks of the files."""


class ChannelOpener:
    """Opens channels of one security."""

    def __init__(self, security: ChannelSecurity | None = None) -> None:
        """Raises INVALID_ARGUMENT naming a file that is wrong."""
        self._security = security or ChannelSecurity()
        self._source = TlsSource(self._security.files, interval_seconds=self._security.reload_interval_seconds)

    def open(self, target: str, options: ChannelOptions) -> grpc.aio.Channel:
        """A channel to a target with or without `tls:`."""
        bare, extra = without_tls(target), _key_metadata(self._security)
        if not needs_tls(target):
            plain = grpc.aio.insecure_channel(bare, options=options)
            return SecuredChannel(_Unchanging(plain), extra) if extra else plain

        def connect(material: TlsMaterial) -> grpc.aio.Channel:
            return grpc.aio.secure_channel(bare, _credentials(material), options=options)

        if not self._security.files.paths and not extra:
            return connect(TlsMaterial())
        return SecuredChannel(_Following(self._source, connect), extra)


def open_sync_channel(target: str, options: ChannelOptions, security: ChannelSecurity | None = None) -> grpc.Channel:
    """A channel to a target with or without `tls:`, for a program without an event loop.

    Raises INVALID_ARGUMENT naming a file that is wrong.
    """
    chosen = security or ChannelSecurity()
    bare, extra = without_tls(target), _key_metadata(chosen)

    def connect(material: TlsMaterial) -> grpc.Channel:
        if needs_tls(target):
            return grpc.secure_channel(bare, _credentials(material), options=options)
        return grpc.insecure_channel(bare, options=options)

    files = chosen.files if needs_tls(target) else TlsFiles()
    if not files.paths and not extra:
        return connect(TlsMaterial())
    source = TlsSource(files, interval_seconds=chosen.reload_interval_seconds)
    return SecuredSyncChannel(source, connect, extra, MAX_RETIRED)


def _credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(material.roots or None, material.key or None, material.certificate or None)


def _key_metadata(security: ChannelSecurity) -> tuple[tuple[str, str], ...]:
    return ((KEY_HEADER, f"Bearer {security.api_key}"),) if security.api_key else ()


class _Connection:
    """A channel that closes once it is retired and its last call has ended."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._calls = 0
        self._on_idle: Callable[[], None] | None = None

    def enter(self, call: Any) -> None:
        """Counts a call that has started."""
        self._calls += 1
        call.add_done_callback(self._leave)

    def retire(self, on_idle: Callable[[], None]) -> None:
        """Calls `on_idle` when the last call has ended, at once if there is none."""
        self._on_idle = on_idle
        if self._calls == 0:
            on_idle()

    def _leave(self, _: Any) -> None:
        self._calls -= 1
        if self._calls == 0 and self._on_idle is not None:
            self._on_idle()


class _Unchanging:
    """One channel that never changes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._connection = _Connection(channel)

    def current(self) -> _Connection:
        return self._connection

    async def close(self, grace: float | None) -> None:
        await self._connection.channel.close(grace)


class _Following:
    """A channel per certificate: new calls use the newest, running calls keep theirs."""

    def __init__(self, source: TlsSource, connect: Callable[[TlsMaterial], grpc.aio.Channel]) -> None:
        self._source = source
        self._connect = connect
        self._version, material = source.current()
        self._connection = _Connection(connect(material))
        self._retired: list[_Connection] = []
        self._closing: set[asyncio.Task[None]] = set()

    def current(self) -> _Connection:
        version, material = self._source.current()
        if version != self._version:
            self._version = version
            old, self._connection = self._connection, _Connection(self._connect(material))
            self._retired.append(old)
            old.retire(lambda: self._end(old))
            if len(self._retired) > MAX_RETIRED:
                log.warning("calls on a connection of an old certificate are cut", kept=MAX_RETIRED)
                self._end(self._retired[0])
        return self._connection

    async def close(self, grace: float | None) -> None:
        retired, self._retired = self._retired, []
        for connection in (*retired, self._connection):
            await connection.channel.close(grace)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _end(self, connection: _Connection) -> None:
        if connection in self._retired:
            self._retired.remove(connection)
            task = asyncio.get_running_loop().create_task(connection.channel.close(None))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


class _Method:
    """An rpc on whatever connection is the current one when it is called."""

    __slots__ = ("_arguments", "_bound", "_connection", "_connections", "_extra", "_kind")

    def __init__(
        self, connections: "_Unchanging | _Following", kind: str, arguments: Any, extra: tuple[tuple[str, str], ...]
    ) -> None:
        self._connections = connections
        self._kind = kind
        self._arguments = arguments
        self._extra = extra
        self._connection: _Connection | None = None
        self._bound: Any = None

    def __call__(self, *arguments: Any, metadata: Any = None, **options: Any) -> Any:
        connection = self._connections.current()
        if connection is not self._connection:
            names, keywords = self._arguments
            self._bound = getattr(connection.channel, self._kind)(*names, **keywords)
            self._connection = connection
        if self._extra:
            metadata = (*(metadata or ()), *self._extra)
        call = self._bound(*arguments, metadata=metadata, **options)
        connection.enter(call)
        return call


class SecuredChannel(grpc.aio.Channel):
    """A channel for stubs whose certificate can change: gRPC's own binds a stub to one certificate.

    Metadata is added here rather than by an interceptor, which would cost every message of a stream.
    """

    def __init__(self, connections: _Unchanging | _Following, extra: tuple[tuple[str, str], ...]) -> None:
        self._connections = connections
        self._extra = extra

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @override
    async def close(self, grace: float | None = None) -> None:
        await self._connections.close(grace)

    @override
    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._connections.current().channel.get_state(try_to_connect)

    @override
    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._connections.current().channel.wait_for_state_change(last_observed_state)

    @override
    async def channel_ready(self) -> None:
        await self._connections.current().channel.channel_ready()

    @override
    def unary_unary(self, *names: Any, **keywords: Any) -> Any:
        return _Method(self._connections, "unary_unary", (names, keywords), self._extra)

    @override
    def unary_stream(self, *names: Any, **keywords: Any) -> Any:
        return _Method(self._connections, "unary_stream", (names, keywords), self._extra)

    @override
    def stream_unary(self, *names: Any, **keywords: Any) -> Any:
        return _Method(self._connections, "stream_unary", (names, keywords), self._extra)

    @override
    def stream_stream(self, *names: Any, **keywords: Any) -> Any:
        return _Method(self._connections, "stream_stream", (names, keywords), self._extra)


Connect = Callable[[TlsMaterial], grpc.Channel]


class _SyncConnection:
    """A channel and the number of its running calls."""

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
    """Connections with the newest certificate for new calls; running calls keep theirs."""

    def __init__(self, source: TlsSource, connect: Connect, extra: tuple[tuple[str, str], ...], most: int) -> None:
        """`extra` is metadata of every call; at most `most` connections of earlier certificates are kept."""
        self._source = source
        self._connect = connect
        self._extra = extra
        self._most = most
        self._lock = threading.Lock()
        self._version, material = source.current()
        self._connection = _SyncConnection(connect(material))
        self._retired: list[_SyncConnection] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def enter(self) -> _SyncConnection:
        """The connection for a new call, which must leave it when it ends."""
        with self._lock:
            version, material = self._source.current()
            if version != self._version:
                self._version = version
                self._retired.append(self._connection)
                self._connection = _SyncConnection(self._connect(material))
            self._close_idle()
            self._connection.enter()
            return self._connection

    @override
    def close(self) -> None:
        with self._lock:
            retired, self._retired = self._retired, []
            for connection in (*retired, self._connection):
                connection.channel.close()

    def subscribe(self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool = False) -> None:
        """As grpc.Channel, of the current connection."""
        self._connection.channel.subscribe(callback, try_to_connect)

    @override
    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        self._connection.channel.unsubscribe(callback)

    @override
    def unary_unary(self, *names: Any, **keywords: Any) -> Any:
        return _SyncMethod(self, "unary_unary", (names, keywords), self._extra)

    @override
    def unary_stream(self, *names: Any, **keywords: Any) -> Any:
        return _SyncMethod(self, "unary_stream", (names, keywords), self._extra)

    @override
    def stream_unary(self, *names: Any, **keywords: Any) -> Any:
        return _SyncMethod(self, "stream_unary", (names, keywords), self._extra)

    @override
    def stream_stream(self, *names: Any, **keywords: Any) -> Any:
        return _SyncMethod(self, "stream_stream", (names, keywords), self._extra)

    def _close_idle(self) -> None:
        """Closes idle channels; not at the end of a call: gRPC's thread must not close its own channel."""
        surplus = len(self._retired) - self._most
        ended = [one for number, one in enumerate(self._retired) if one.calls == 0 or number < surplus]
        self._retired = [one for one in self._retired if one not in ended]
        for connection in ended:
            connection.channel.close()


class _SyncMethod:
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
            # A finished call accepts no callback, and returns False.
            is_left = self._kind.endswith("_stream") and answer.add_callback(connection.leave)
            return answer
        finally:
            if not is_left:
                connection.leave()
