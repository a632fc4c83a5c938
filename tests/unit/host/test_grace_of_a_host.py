"""The grace of a server's stop, which its services share."""

from collections.abc import Sequence
from pathlib import Path

import grpc
from typing_extensions import override

from weft.kernel.services.service_lifecycle import Service
from weft_app.compose.grpc_host import GrpcHost
from weft_testing.fake_clock import FakeClock

GRACE_SECONDS = 10.0


class _SlowService(Service):
    """A service whose stop takes its time, whatever its grace is."""

    service_names: Sequence[str] = ()

    def __init__(self, clock: FakeClock, stop_seconds: float) -> None:
        self._clock = clock
        self._stop_seconds = stop_seconds
        self.grace_seconds = 0.0

    @override
    def register(self, server: grpc.aio.Server) -> None:
        """Registers nothing."""

    @override
    async def start(self) -> None:
        """Does nothing."""

    @override
    async def stop(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        await self._clock.advance(self._stop_seconds)


async def test_services_drained_in_sequence_share_one_grace_period(tmp_path: Path) -> None:
    """Tasks of a router had the whole grace again after its publishers and dial-out runners had used it up."""
    clock = FakeClock()
    host = GrpcHost(clock=clock)
    host.bind(f"unix:{tmp_path}/host.sock")
    services = [_SlowService(clock, seconds) for seconds in (0.0, 8.0, 7.0)]
    await host.start(services)
    await host.stop(GRACE_SECONDS)
    assert [each.grace_seconds for each in services] == [0.0, GRACE_SECONDS - 7.0, GRACE_SECONDS]
