"""The endpoint picker as a service of `weft_app.compose`, in the process of a router."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import grpc
from typing_extensions import override

from gateway.deps import InferenceDeps
from gateway.picker.intake import LaneIntake
from gateway.picker.lane_requests import LanePorts, LaneRequests
from gateway.picker.limits import PickerLimits
from gateway.picker.metrics import PickerMetrics
from gateway.picker.servicer import AccessLog, ExternalProcessor, add_to_server
from weft.dispatch.lane import AttemptReports
from weft.durable.journal_policy import JournalPolicy
from weft.kernel.lane_names import ACCESS_LOG_SERVICE, EXTERNAL_PROCESSOR
from weft.kernel.metrics import MetricsPage
from weft.kernel.service import Service


def build(
    limits: PickerLimits,
    deps: InferenceDeps,
    ports: LanePorts,
    journal: JournalPolicy,
    *,
    gateway: str = "",
    metrics: MetricsPage | None = None,
) -> "PickerService":
    """Returns a picker, not started.

    `deps` are those of a gateway of the same settings, `journal` says which requests are tasks. `gateway`: where the
    proxy sends what the lane cannot do, `ip:port`; empty: such requests are refused.
    """
    return PickerService(limits, deps, ports, journal, gateway, PickerMetrics(metrics))


class PickerService(Service):
    """The external processor and the access log service of the lane."""

    service_names: Sequence[str] = (EXTERNAL_PROCESSOR, ACCESS_LOG_SERVICE)

    def __init__(
        self,
        limits: PickerLimits,
        deps: InferenceDeps,
        ports: LanePorts,
        journal: JournalPolicy,
        gateway: str,
        metrics: PickerMetrics,
    ) -> None:
        self._lane = LaneRequests(ports, limits, metrics)
        metrics.show_open(lambda: self._lane.open_count)
        intake = LaneIntake(deps, journal, has_gateway=bool(gateway))
        self._processor = ExternalProcessor(deps, intake, self._lane, metrics, gateway)
        self._access_log = AccessLog(self._lane)

    @property
    def reports(self) -> AttemptReports:
        """Where the router passes the reports of runners."""
        return self._lane

    @override
    def register(self, server: grpc.aio.Server) -> None:
        add_to_server(self._processor, self._access_log, server)

    @override
    async def start(self) -> None:
        await self._lane.start()

    @override
    async def stop(self, grace_seconds: float) -> None:
        """Waits for the ends of requests for at most the grace; those that go on without it end in its books."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._lane.idle(), grace_seconds)
        await self._lane.stop()
