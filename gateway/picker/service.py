"""The endpoint picker as a service of `weft_app.compose`, in the process of a router."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import grpc
from typing_extensions import override

from gateway.deps import InferenceDeps
from gateway.picker.intake import LaneIntake
from gateway.picker.lane_requests import LanePorts, LaneRequests
from gateway.picker.limits import PickerLimits
from gateway.picker.metrics import PickerMetrics
from gateway.picker.servicer import AccessLog, ExternalProcessor, Intakes, ProtocolHooks, add_to_server
from weft.dispatch.lane import AttemptReports
from weft.durable.journal_policy import JournalPolicy
from weft.kernel.lane_names import ACCESS_LOG_SERVICE, EXTERNAL_PROCESSOR, INFERENCE_EXTENSION
from weft.kernel.metrics import MetricsPage
from weft.kernel.service import Service


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerServing:
    """How `weft serve picker` serves gateways that weft has not configured."""

    is_secure: bool = False
    """TLS with a certificate that weft makes itself. Its peers show none, so that their access logs are not taken."""
    for_conformance: bool = False
    """The hooks of the conformance tests of gateways."""


ON_THIS_MACHINE = PickerServing()


def build(
    limits: PickerLimits,
    deps: InferenceDeps,
    ports: LanePorts,
    journal: JournalPolicy,
    *,
    gateway: str = "",
    metrics: MetricsPage | None = None,
    serving: PickerServing = ON_THIS_MACHINE,
) -> "PickerService":
    """Returns a picker, not started.

    `deps` are those of a gateway of the same settings, `journal` says which requests are tasks. `gateway`: where the
    proxy sends what the lane cannot do, `ip:port`; empty: such requests are refused.
    """
    hooks = ProtocolHooks(for_conformance=serving.for_conformance, fairness_tenants=limits.fairness_tenants)
    page = PickerMetrics(metrics)
    lane = LaneRequests(ports, limits, page)
    page.show_open(lambda: lane.open_count)
    intakes = Intakes(
        own=LaneIntake(deps, journal, has_gateway=bool(gateway), host=ports.host),
        foreign=LaneIntake(deps, journal, has_gateway=False),
    )
    processor = ExternalProcessor(deps, intakes, lane, page, gateway, hooks)
    return PickerService(lane, processor, None if serving.is_secure else AccessLog(lane))


class PickerService(Service):
    """The external processor and the access log service of the lane."""

    def __init__(self, lane: LaneRequests, processor: ExternalProcessor, access_log: AccessLog | None) -> None:
        """`access_log`: None where the peers are not known: an entry ends a request."""
        self._lane = lane
        self._processor = processor
        self._access_log = access_log
        log_names = () if access_log is None else (ACCESS_LOG_SERVICE,)
        self._names = (EXTERNAL_PROCESSOR, INFERENCE_EXTENSION, *log_names)

    @override
    @property
    def service_names(self) -> Sequence[str]:
        return self._names

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
