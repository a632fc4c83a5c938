"""Health checks of the router in an interval, because a frozen process keeps its connections open."""

from typing import TYPE_CHECKING, Protocol, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weft.api.router.v1 import placement_service_pb2
from weft.kernel.clock import Clock
from weft.kernel.log import get_logger
from weft.kernel.service import start_task, stop_tasks

if TYPE_CHECKING:
    import asyncio

log = get_logger("weft.router_watch")

CHECK_INTERVAL_SECONDS = 1.0
CHECK_TIMEOUT_SECONDS = 2.0
"""A router that does not answer a health check for this long counts as away."""
_PLACEMENT = placement_service_pb2.DESCRIPTOR.services_by_name["PlacementService"].full_name


class RouterSource(Protocol):
    """Source of the router's availability."""

    @property
    def is_there(self) -> bool:
        """Whether a router answered the last health check."""
        ...


class RouterWatch:
    """See RouterSource. Life cycle: start, stop."""

    def __init__(self, router: grpc.aio.Channel, clock: Clock) -> None:
        self._stub = health_pb2_grpc.HealthStub(router)
        self._clock = clock
        self._is_there = False
        self._task: asyncio.Task[None] | None = None

    @property
    def is_there(self) -> bool:
        """See RouterSource.is_there; False before the first answer."""
        return self._is_there

    async def start(self) -> None:
        """Begin to ask. Returns at once."""
        self._task = start_task(self._follow(), name="router-watch")

    async def stop(self) -> None:
        """Stop asking. Safe to call twice, or when never started."""
        if self._task is not None:
            await stop_tasks([self._task])
            self._task = None

    async def _follow(self) -> None:
        while True:
            was_there, self._is_there = self._is_there, await self._answers()
            if was_there and not self._is_there:
                log.warning("no router answers")
            elif self._is_there and not was_there:
                log.info("a router answers")
            await self._clock.sleep(CHECK_INTERVAL_SECONDS)

    async def _answers(self) -> bool:
        request = health_pb2.HealthCheckRequest(service=_PLACEMENT)
        try:
            answer = await self._stub.Check(request, timeout=CHECK_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError:
            return False
        except Exception:
            # A watch that ended would say for good what it said last.
            log.exception("the router cannot be asked for its health")
            return False
        status = cast("health_pb2.HealthCheckResponse", answer).status
        return bool(status == health_pb2.HealthCheckResponse.SERVING)
