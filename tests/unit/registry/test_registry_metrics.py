"""The metrics of a registry."""

import pytest
from prometheus_client import generate_latest

from registry_svc.registry_metrics import add_registry_metrics
from registry_svc.registry_service import RegistryFigures
from weft.api.registry.v1 import lease_pb2
from weft.api.registry.v1 import lease_service_pb2 as pb
from weft.kernel.telemetry.metrics_page import MetricsPage


def _lines(figures: RegistryFigures | None) -> list[str]:
    page = MetricsPage()
    add_registry_metrics(lambda: figures, page)
    return [line for line in generate_latest(page).decode().splitlines() if not line.startswith("#")]


def test_ledger_metrics_are_per_device_and_omit_unknown_figures() -> None:
    seen = lease_pb2.Device(index=0, total_bytes=100, used_bytes=60)
    host = pb.HostMemory(host="box", waiting_count=2)
    host.devices.add(device=seen, booked_bytes=50, foreign_bytes=10, free_bytes=30, margin_bytes=10)
    host.devices.add(device=lease_pb2.Device(index=1, total_bytes=100), booked_bytes=0, free_bytes=90, margin_bytes=10)
    host.leases.add(state=lease_pb2.Lease.STATE_HELD)
    host.leases.add(state=lease_pb2.Lease.STATE_HELD)
    host.leases.add(state=lease_pb2.Lease.STATE_ORPHANED)
    figures = RegistryFigures(
        hosts=[host], active_sessions=3, inactive_sessions=1, revision=42, watchers=2, evictions={"given_up": 5}
    )
    lines = _lines(figures)
    devices = [line.partition("weft_ledger_device_bytes")[2] for line in lines if "weft_ledger_device_bytes" in line]
    assert devices == [
        '{device="0",host="box",kind="total"} 100.0',
        '{device="0",host="box",kind="reserved"} 50.0',
        '{device="0",host="box",kind="seen"} 60.0',
        '{device="0",host="box",kind="foreign"} 10.0',
        '{device="0",host="box",kind="free"} 30.0',
        '{device="1",host="box",kind="total"} 100.0',
        '{device="1",host="box",kind="reserved"} 0.0',
        '{device="1",host="box",kind="free"} 90.0',
    ]
    assert 'weft_leases{host="box",state="held"} 2.0' in lines
    assert 'weft_leases{host="box",state="orphaned"} 1.0' in lines
    assert 'weft_waiting_leases{host="box"} 2.0' in lines
    assert 'weft_sessions{state="active"} 3.0' in lines
    assert 'weft_sessions{state="inactive"} 1.0' in lines
    assert 'weft_evictions_total{answer="given_up"} 5.0' in lines
    assert "weft_registry_revision 42.0" in lines
    assert "weft_registry_watchers 2.0" in lines


@pytest.mark.parametrize(("has_standby", "value"), [(True, "1.0"), (False, "0.0")])
def test_waiting_standby_has_a_metric(has_standby: bool, value: str) -> None:
    figures = RegistryFigures(
        hosts=[], active_sessions=0, inactive_sessions=0, revision=1, watchers=0, evictions={}, has_standby=has_standby
    )
    assert f"weft_registry_standby {value}" in _lines(figures)


def test_stopped_registry_exposes_no_metrics() -> None:
    assert _lines(None) == []
