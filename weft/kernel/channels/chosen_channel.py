"""Channels that choose an underlying channel for each call. A call stays on the channel where it began."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
from typing_extensions import override


class CallsByKind(ABC):
    """Passes the four call methods of a gRPC channel to `method`."""

    @abstractmethod
    def method(self, kind: str, names: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Returns the callable that a channel's method `kind`, such as "unary_stream", makes of the other arguments."""

    def unary_unary(self, *names: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self.method("unary_unary", names, options)

    def unary_stream(self, *names: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self.method("unary_stream", names, options)

    def stream_unary(self, *names: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self.method("stream_unary", names, options)

    def stream_stream(self, *names: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self.method("stream_stream", names, options)


class ChosenChannel(CallsByKind, grpc.aio.Channel):
    """A grpc.aio channel over other channels."""

    @abstractmethod
    def current(self) -> grpc.aio.Channel:
        """Returns the channel in use."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @override
    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current().get_state(try_to_connect)

    @override
    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.current().wait_for_state_change(last_observed_state)

    @override
    async def channel_ready(self) -> None:
        await self.current().channel_ready()


class ChosenSyncChannel(CallsByKind, grpc.Channel):
    """A blocking gRPC channel over other channels, safe for threads."""

    @abstractmethod
    def current(self) -> grpc.Channel:
        """Returns the channel in use."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @override
    def subscribe(self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool = False) -> None:
        self.current().subscribe(callback, try_to_connect)

    @override
    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        self.current().unsubscribe(callback)


class PickedChannel(ChosenChannel):
    """A channel over channels that its caller owns and closes."""

    def __init__(self, pick: Callable[[], grpc.aio.Channel]) -> None:
        """`pick` returns the channel of the next call; what it raises, the call raises."""
        self._pick = pick

    @override
    def current(self) -> grpc.aio.Channel:
        return self._pick()

    @override
    async def close(self, grace: float | None = None) -> None:
        pass

    @override
    def method(self, kind: str, names: tuple[Any, ...], options: dict[str, Any]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(self._pick(), kind)(*names, **options)(*args, **kwargs)

        return call
