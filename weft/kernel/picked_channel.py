"""A channel that chooses for each call where it goes: to one of several servers that are equal for the caller."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
from typing_extensions import override

Pick = Callable[[], grpc.aio.Channel]


class PickedChannel(grpc.aio.Channel):
    """A channel over those of another owner, who closes them. A call that has begun stays where it is."""

    def __init__(self, pick: Pick) -> None:
        """`pick` returns the channel of the next call; what it raises, the call raises."""
        self._pick = pick

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    @override
    async def close(self, grace: float | None = None) -> None:
        pass

    @override
    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._pick().get_state(try_to_connect)

    @override
    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._pick().wait_for_state_change(last_observed_state)

    @override
    async def channel_ready(self) -> None:
        await self._pick().channel_ready()

    @override
    def unary_unary(self, *method: Any, **options: Any) -> Any:
        return self._picking(lambda channel: channel.unary_unary(*method, **options))

    @override
    def unary_stream(self, *method: Any, **options: Any) -> Any:
        return self._picking(lambda channel: channel.unary_stream(*method, **options))

    @override
    def stream_unary(self, *method: Any, **options: Any) -> Any:
        return self._picking(lambda channel: channel.stream_unary(*method, **options))

    @override
    def stream_stream(self, *method: Any, **options: Any) -> Any:
        return self._picking(lambda channel: channel.stream_stream(*method, **options))

    def _picking(self, method_of: Callable[[grpc.aio.Channel], Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return method_of(self._pick())(*args, **kwargs)

        return call
