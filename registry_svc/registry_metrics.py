"""Prometheus metrics of the registry: devices, leases, sessions and watches."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client.core import Metric

from registry_svc.registry_service import RegistryFigures
from weft.api.registry.v1 import lease_pb2
from weft.api.registry.v1 import lease_service_pb2 as pb
from weft.kernel.telemetry.metrics_page import MetricsPage

_LEASE_STATES = {
    number: name.removeprefix("STATE_").lower() for name, number in lease_pb2.Lease.State.items() if number
}


def add_registry_metrics(figures: Callable[[], RegistryFigures | None], page: MetricsPage) -> None:
    """Adds the metrics of a registry to a page. `figures` returns None if it is not running."""
    page.add(partial(_registry_metrics, figures, page))


def _registry_metrics(figures: Callable[[], RegistryFigures | None], page: MetricsPage) -> Iterator[Metric]:
    found = figures()
    if found is None:
        return
    hosts = list(found.hosts)
    yield page.gauge(
        "weft_ledger_device_bytes",
        "Memory of an accelerator: total, reserved by leases, in use, foreign (without a lease), free.",
        ("host", "device", "kind"),
        (
            ((host.host, str(memory.device.index), kind), value)
            for host in hosts
            for memory in host.devices
            for kind, value in _kinds(memory)
        ),
    )
    leases = Counter((host.host, _LEASE_STATES.get(lease.state, "unknown")) for host in hosts for lease in host.leases)
    yield page.gauge("weft_leases", "Leases of accelerator memory, by state.", ("host", "state"), leases.items())
    yield page.gauge(
        "weft_waiting_leases",
        "Requests waiting for memory of a host.",
        ("host",),
        (((host.host,), host.waiting_count) for host in hosts),
    )
    sessions = ((("active",), found.active_sessions), (("inactive",), found.inactive_sessions))
    yield page.gauge("weft_sessions", "Sessions of runners, by state.", ("state",), sessions)
    yield page.count(
        "weft_evictions",
        "Evictions requested from runners, by result.",
        ("answer",),
        (((answer,), count) for answer, count in found.evictions.items()),
    )
    yield page.figure("weft_registry_revision", "Current revision of the mesh.", found.revision)
    yield page.figure("weft_registry_watchers", "Open watches of the mesh.", found.watchers)
    yield page.figure(
        "weft_registry_standby", "Whether a standby is waiting for this registry: 1 or 0.", int(found.has_standby)
    )


def _kinds(memory: pb.DeviceMemory) -> Iterator[tuple[str, int]]:
    device = memory.device
    yield "total", device.total_bytes
    yield "reserved", memory.booked_bytes
    if device.HasField("used_bytes"):
        yield "seen", device.used_bytes
    if memory.HasField("foreign_bytes"):
        yield "foreign", memory.foreign_bytes
    yield "free", memory.free_bytes
