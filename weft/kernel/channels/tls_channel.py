"""Client channels with API keys and with certificates that follow their files."""

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import grpc
from typing_extensions import override

from weft.kernel.channels.chosen_channel import CallsByKind, ChosenChannel, ChosenSyncChannel
from weft.kernel.channels.tls import TlsFiles, TlsMaterial, TlsSource
from weft.kernel.telemetry.log import get_logger
from weft.kernel.values.address import needs_tls, without_tls

ChannelOptions = Sequence[tuple[str, int | str]]
Metadata = tuple[tuple[str, str], ...]
Connect = Callable[[TlsMaterial], Any]
KEY_HEADER = "authorization"
MAX_RETIRED = 8
"""Maximum connections with earlier certificates that still have calls; the oldest beyond that is closed."""

log = get_logger("weft.tls")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSecurity:
    """A caller's credentials and trusted roots. The address decides whether TLS is used (`values.address`)."""

    files: TlsFiles = field(default_factory=TlsFiles)
    api_key: str = field(default="", repr=False)
    """Sent as a Bearer token with every call, which uses TLS or stays on this machine. Empty: none."""
    reload_interval_seconds: float = 5.0
    """Minimum time between checks of the files."""


class ChannelOpener:
    """Opens channels with the same credentials and roots."""

    def __init__(self, security: ChannelSecurity | None = None) -> None:
        """Raises INVALID_ARGUMENT naming an invalid file."""
        self._security = security or ChannelSecurity()
        self._source = TlsSource(self._security.files, interval_seconds=self._security.reload_interval_seconds)

    def open(self, target: str, options: ChannelOptions) -> grpc.aio.Channel:
        """Returns a channel to a target with or without `tls:`."""
        return cast("grpc.aio.Channel", self._opened(grpc.aio, SecuredChannel, target, options))

    def open_sync(self, target: str, options: ChannelOptions) -> grpc.Channel:
        """Returns a channel to a target with or without `tls:`, for programs without an event loop."""
        return cast("grpc.Channel", self._opened(grpc, SecuredSyncChannel, target, options))

    def _opened(self, api: Any, secured: Callable[..., Any], target: str, options: ChannelOptions) -> Any:
        """`api` is grpc or grpc.aio, `secured` the channel class over its connections."""
        bare, is_tls, key = without_tls(target), needs_tls(target), self._security.api_key

        def connect(material: TlsMaterial) -> Any:
            if is_tls:
                return api.secure_channel(bare, _credentials(material), options=options)
            return api.insecure_channel(bare, options=options)

        follows_files = is_tls and self._security.files.paths
        if not follows_files and not key:
            return connect(TlsMaterial())
        extra = ((KEY_HEADER, f"Bearer {key}"),) if key else ()
        return secured(self._source if follows_files else None, connect, extra)


def _credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(material.roots or None, material.key or None, material.certificate or None)


@dataclass(eq=False, slots=True)
class _Connection:
    channel: Any
    calls: int = 0


class _Connections:
    """A connection per certificate: new calls use the newest, running calls keep theirs. Thread-safe.

    A retired connection is closed after its last call, or when more than MAX_RETIRED of them have calls.
    """

    def __init__(
        self, source: TlsSource | None, connect: Connect, close: Callable[[Any], None], *, closes_at_end: bool
    ) -> None:
        """`connect` and `close` open and close a channel; without `source` there is only one.

        `closes_at_end`: close a retired connection when its last call ends, not when the next call starts.
        """
        self._source = source
        self._connect = connect
        self._close = close
        self._closes_at_end = closes_at_end
        self._lock = threading.Lock()
        self._version, material = (0, TlsMaterial()) if source is None else source.current()
        self._newest = _Connection(connect(material))
        self.retired: list[_Connection] = []

    def current(self) -> Any:
        """Returns the channel with the newest certificate."""
        connection = self.enter()
        self.leave(connection)
        return connection.channel

    def enter(self) -> _Connection:
        """Returns the connection for a new call. Pass it to `leave` when the call ends."""
        with self._lock:
            if self._source is not None:
                self._follow(self._source)
            connection = self._newest
            connection.calls += 1
            ended = self._take_ended() if self.retired else ()
        for one in ended:
            self._close_connection(one)
        return connection

    def leave(self, connection: _Connection, _: object = None) -> None:
        """Counts a call that has ended. The second argument lets it be a callback of the call."""
        with self._lock:
            connection.calls -= 1
            ended = self._take_ended() if self.retired and self._closes_at_end else ()
        for one in ended:
            self._close_connection(one)

    def take_all(self) -> list[Any]:
        """Returns all channels, for the owner to close."""
        with self._lock:
            retired, self.retired = self.retired, []
            return [connection.channel for connection in (*retired, self._newest)]

    def _follow(self, source: TlsSource) -> None:
        """Retires the newest connection if the certificate has changed."""
        version, material = source.current()
        if version != self._version:
            self._version = version
            self.retired.append(self._newest)
            self._newest = _Connection(self._connect(material))

    def _take_ended(self) -> list[_Connection]:
        surplus = len(self.retired) - MAX_RETIRED
        ended = [one for index, one in enumerate(self.retired) if one.calls == 0 or index < surplus]
        self.retired = [one for one in self.retired if one not in ended]
        return ended

    def _close_connection(self, connection: _Connection) -> None:
        if connection.calls:
            log.warning("calls on a connection of an old certificate are cut", kept=MAX_RETIRED)
        self._close(connection.channel)


class _Method:
    """An rpc on the newest connection at the time of the call."""

    def __init__(self, channel: "_SecuredCalls", kind: str, names: tuple[Any, ...], options: dict[str, Any]) -> None:
        """`kind` is the channel method, such as "unary_stream", that makes the rpc of the other arguments."""
        self._channel = channel
        self._kind = kind
        self._arguments = names, options

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._begin("__call__", self._kind, *arguments, **options)

    def future(self, *arguments: Any, **options: Any) -> Any:
        """See grpc.UnaryUnaryMultiCallable."""
        return self._begin("future", "future", *arguments, **options)

    def _begin(self, form: str, kind: str, *arguments: Any, metadata: Any = None, **options: Any) -> Any:
        channel, (names, keywords) = self._channel, self._arguments
        connection = channel.connections.enter()
        is_watched = False
        try:
            method = getattr(connection.channel, self._kind)(*names, **keywords)
            if channel.extra:
                metadata = (*(metadata or ()), *channel.extra)
            call = getattr(method, form)(*arguments, metadata=metadata, **options)
            is_watched = channel.watch(kind, call, partial(channel.connections.leave, connection))
            return call
        finally:
            if not is_watched:
                channel.connections.leave(connection)


class _SecuredCalls(CallsByKind):
    """Calls on channels with changing certificates; a plain gRPC channel binds a stub to one certificate.

    Metadata is added here, because an interceptor would add a cost to every message of a stream.
    """

    extra: Metadata
    """Metadata of every call."""
    connections: _Connections

    @abstractmethod
    def watch(self, kind: str, call: Any, on_end: Callable[..., None]) -> bool:
        """Calls `on_end` when a call ends. Returns False if it has ended. `kind`: that of the rpc, or "future"."""

    @override
    def method(self, kind: str, names: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return _Method(self, kind, names, options)

    def current(self) -> Any:
        """Returns the channel with the newest certificate."""
        return self.connections.current()


class SecuredChannel(_SecuredCalls, ChosenChannel):
    """A grpc.aio channel with an API key or changing certificates."""

    def __init__(self, source: TlsSource | None, connect: Connect, extra: Metadata) -> None:
        """`extra` is metadata of every call."""
        self.extra = extra
        self.connections = _Connections(source, connect, self._close_retired, closes_at_end=True)
        self.closing: set[asyncio.Task[None]] = set()

    @override
    def watch(self, kind: str, call: Any, on_end: Callable[..., None]) -> bool:
        call.add_done_callback(on_end)
        return True

    def _close_retired(self, channel: grpc.aio.Channel) -> None:
        task = asyncio.get_running_loop().create_task(channel.close(None))
        self.closing.add(task)
        task.add_done_callback(self.closing.discard)

    @override
    async def close(self, grace: float | None = None) -> None:
        for channel in self.connections.take_all():
            await channel.close(grace)
        await asyncio.gather(*self.closing, return_exceptions=True)


class SecuredSyncChannel(_SecuredCalls, ChosenSyncChannel):
    """A blocking gRPC channel with an API key or changing certificates."""

    def __init__(self, source: TlsSource | None, connect: Connect, extra: Metadata) -> None:
        """`extra` is metadata of every call."""
        self.extra = extra
        # Callbacks run on a thread of the channel, which must not close the channel.
        self.connections = _Connections(source, connect, lambda channel: channel.close(), closes_at_end=False)

    @override
    def watch(self, kind: str, call: Any, on_end: Callable[..., None]) -> bool:
        # A unary call has already ended; an ended call accepts no callback.
        return kind.endswith(("_stream", "future")) and bool(call.add_callback(on_end))

    @override
    def close(self) -> None:
        for channel in self.connections.take_all():
            channel.close()
