"""Prometheus metrics of the registry: the ledger of each device, leases, sessions, and its watch."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from registry_svc.figures import RegistryFigures
from weft.api.registry.v1 import lease_pb2
from weft.api.registry.v1 import lease_service_pb2 as pb
from weft.kernel.metrics import MetricsPage, add_bounded

_LEASE_STATES = {
    number: name.removeprefix("STATE_").lower() for name, number in lease_pb2.Lease.State.items() if number
}


class HasFigures(Protocol):
    """A registry."""

    def figures(self) -> RegistryFigures | None:
        """Returns its state; None: it does not run."""
        ...


class RegistryMetrics(Collector):
    """The metrics of one registry, read with each scrape."""

    def __init__(self, registry: HasFigures, page: MetricsPage) -> None:
        """Adds itself to a page."""
        self._registry = registry
        self._most = page.limits.max_single_series
        page.register(self)

    def describe(self) -> Iterable[Metric]:
        """Returns nothing: the metrics depend on what there is."""
        return ()

    @override
    def collect(self) -> Iterator[Metric]:
        found = self._registry.figures()
        if found is None:
            return
        hosts = list(found.hosts)
        yield self._devices(hosts)
        yield from self._leases(hosts)
        sessions = GaugeMetricFamily("weft_sessions", "Sessions of runners, by state.", labels=("state",))
        sessions.add_metric(("active",), found.active_sessions)
        sessions.add_metric(("inactive",), found.inactive_sessions)
        evictions = CounterMetricFamily(
            "weft_evictions",
            "Models that a runner was asked to unload for another one, by its answer.",
            labels=("answer",),
        )
        for answer, count in found.evictions.items():
            evictions.add_metric((answer,), count)
        yield sessions
        yield evictions
        yield GaugeMetricFamily("weft_registry_revision", "Number of the mesh's last change.", value=found.revision)
        yield GaugeMetricFamily("weft_registry_watchers", "Watches of the mesh that are open.", value=found.watchers)
        yield GaugeMetricFamily(
            "weft_registry_standby",
            "Whether a standby waits for the end of this registry: 1 or 0.",
            value=int(found.has_standby),
        )

    def _devices(self, hosts: Iterable[pb.HostMemory]) -> Metric:
        family = GaugeMetricFamily(
            "weft_ledger_device_bytes",
            "Memory of an accelerator: total, reserved by leases, seen in use, foreign (without a lease), free.",
            labels=("host", "device", "kind"),
        )
        values = (
            ((host.host, str(memory.device.index), kind), value)
            for host in hosts
            for memory in host.devices
            for kind, value in _kinds(memory)
        )
        add_bounded(family, values, self._most)
        return family

    def _leases(self, hosts: Iterable[pb.HostMemory]) -> Iterator[Metric]:
        leases = GaugeMetricFamily("weft_leases", "Leases of accelerator memory, by state.", labels=("host", "state"))
        waiting = GaugeMetricFamily("weft_waiting_leases", "Requests that wait for memory of a host.", labels=("host",))
        counts = Counter(
            (host.host, _LEASE_STATES.get(lease.state, "unknown")) for host in hosts for lease in host.leases
        )
        add_bounded(leases, counts.items(), self._most)
        add_bounded(waiting, (((host.host,), host.waiting_count) for host in hosts), self._most)
        yield leases
        yield waiting


def _kinds(memory: pb.DeviceMemory) -> Iterator[tuple[str, int]]:
    device = memory.device
    yield "total", device.total_bytes
    yield "reserved", memory.booked_bytes
    if device.HasField("used_bytes"):
        yield "seen", device.used_bytes
    if memory.HasField("foreign_bytes"):
        yield "foreign", memory.foreign_bytes
    yield "free", memory.free_bytes
