"""`hold_memory` in a program's own process, over a scripted ledger and scripted devices."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kit.waiting import wait_until
from scripted_ledger import Script, scripted_ledger

from weft.api.common.v1 import priority_pb2
from weft.api.registry.v1 import lease_pb2, lease_service_pb2
from weft.client import _lease_renewal, leases
from weft.client._lease_renewal import DEFAULT_RENEW_SECONDS, LeaseClient, LeaseManager
from weft.client.leases import MAX_CALL_WAIT_SECONDS, MemoryLease, hold_memory, program_name
from weft.gpu.nvml import Health, NvmlReading
from weft.gpu.observer import HostObserver, declared_snapshots
from weft.gpu.process import process_id_of
from weft.gpu.snapshot import DeviceSnapshot
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason

GIB = 1024**3
CARDS = tuple(
    DeviceSnapshot(index=at, id=f"GPU-{at}", name="Card", total_bytes=8 * GIB, used_bytes=0) for at in range(2)
)


class Cards:
    """Two cards that nobody uses."""

    def __init__(self, devices: tuple[DeviceSnapshot, ...] = CARDS) -> None:
        self._reading = NvmlReading(health=Health.WELL, devices=devices, names_processes=True)

    def read(self) -> NvmlReading:
        return self._reading


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    for module in (leases, _lease_renewal):
        monkeypatch.setattr(module, "RETRY_SECONDS", 0.1)
    with scripted_ledger() as script:
        yield script


def _hold(ledger: Script, memory: str | int = "8GiB", **options: Any) -> Any:
    return hold_memory(memory, target=ledger.target, **{"observer": HostObserver(reader=Cards()), **options})


def _pids(use: lease_service_pb2.LeaseUse) -> list[int]:
    return [process.pid for process in use.processes]


def test_lease_is_acquired_renewed_with_observed_usage_and_released(ledger: Script) -> None:
    with _hold(ledger, purpose="training", devices=[1, 0], max_devices=2, priority="low", wait_seconds=30) as lease:
        assert isinstance(lease, MemoryLease)
        assert (lease.id, lease.fencing_number, lease.devices) == ("lease-1", 17, [0, 1])
        assert lease.shares == {0: 8 * GIB, 1: 8 * GIB}
        assert lease.environment() == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1"}
        lease.check()
        assert ledger.uses(), "it was renewed before the block began"
        count = len(ledger.uses())
        wait_until(lambda: len(ledger.uses()) >= count + 3)
        assert ledger.released == []
    (asked,) = ledger.acquired
    assert (asked.bytes, asked.purpose, list(asked.device_indexes), asked.max_devices) == (
        8 * GIB,
        "training",
        [0, 1],
        2,
    )
    assert asked.priority == priority_pb2.PRIORITY_LOW
    assert asked.max_wait.seconds in (29, 30)
    assert [device.id for device in asked.sighting.devices] == ["GPU-0", "GPU-1"]
    assert asked.holder.kind == lease_pb2.LeaseHolder.KIND_PROGRAM
    assert {(use.lease_id, use.fencing_number, use.filled) for use in ledger.uses()} == {("lease-1", 17, False)}
    assert all(os.getpid() in _pids(use) for use in ledger.uses())
    assert [(one.lease_id, one.fencing_number) for one in ledger.released] == [("lease-1", 17)]
    assert ledger.released[0].holder == asked.holder
    assert not ledger.renewed[-1].leases, "after the release it is told once more what is seen"


def test_lease_renewal_interval_applies_from_the_start(ledger: Script) -> None:
    """Regression: the first pause was that of a program without a lease, 5 s, whatever the time to live."""
    with _hold(ledger):
        begun, count = time.monotonic(), len(ledger.uses())
        wait_until(lambda: len(ledger.uses()) >= count + 5)
        assert time.monotonic() - begun < DEFAULT_RENEW_SECONDS


def test_processes_started_in_the_block_are_reported_and_awaited(ledger: Script) -> None:
    with _hold(ledger):
        child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
        try:
            wait_until(lambda: child.pid in _pids(ledger.uses()[-1]))
            assert process_id_of(child.pid) is not None
        except BaseException:
            child.kill()
            raise
        assert child.stdin is not None
        threading.Timer(0.1, child.communicate, [b"\n"]).start()
    assert process_id_of(child.pid) is None, "the block ended after the child"
    assert child.wait() == 0
    assert child.pid not in _pids(ledger.uses()[-1])


def test_lost_lease_is_reported_raised_at_the_next_check_and_not_released(ledger: Script) -> None:
    told = threading.Event()
    with _hold(ledger, on_lost=told.set) as lease:
        lease.check()
        ledger.is_lost = True
        assert told.wait(10.0)
        assert lease.is_lost
        with pytest.raises(WeftError) as lost:
            lease.check()
        assert lost.value.reason is Reason.LEASE_LOST
        with pytest.raises(WeftError):
            lease.held_by(os.getpid())
    assert ledger.released == []


def test_grant_whose_first_renewal_fails_is_void_and_not_lost(ledger: Script) -> None:
    """Regression: the ledger gave it up meanwhile, and the next grant of the same wait counted as lost."""
    calls = LeaseClient(ledger.target, lease_pb2.LeaseHolder())
    keeper = LeaseManager(calls, HostObserver(reader=Cards()), tuple, lambda: None)
    granted = lease_service_pb2.GrantedLease(lease=lease_pb2.Lease(lease_id="lease-0", fencing_number=16))
    ledger.is_away = True
    with pytest.raises(WeftError):
        keeper.adopt(granted)
    ledger.is_away, ledger.is_lost = False, True
    keeper.confirm()
    calls.close()
    assert not keeper.lost.is_set()


def test_ledger_outage_loses_no_lease(ledger: Script) -> None:
    with _hold(ledger) as lease:
        ledger.is_away = True
        time.sleep(0.5)
        lease.check()
        ledger.is_away = False
        count = len(ledger.uses())
        wait_until(lambda: len(ledger.uses()) > count)
        ledger.is_away = True
    # The end of the block is no error either: the ledger finds out by itself.


def test_error_or_ctrl_c_in_the_block_releases_and_propagates(ledger: Script) -> None:
    for error in (ValueError("mine"), KeyboardInterrupt()):
        with pytest.raises(type(error)), _hold(ledger):
            raise error
    assert len(ledger.released) == 2


def test_wait_reason_is_reported_once_per_change(ledger: Script) -> None:
    told: list[str] = []
    ledger.waits = ["held by qwen (busy)", "held by qwen (busy)", "held by qwen (unloading)"]
    with _hold(ledger, on_waiting=told.append):
        assert told == ["held by qwen (busy)", "held by qwen (unloading)"]


def test_wait_longer_than_the_ledger_limit_requeues(ledger: Script) -> None:
    ledger.waits = ["held by qwen"]
    ledger.refusals = [WeftError(Reason.INSUFFICIENT_MEMORY, "held by qwen")] * 2
    with _hold(ledger, wait_seconds=1000):
        assert len(ledger.acquired) == 3
    assert len({asked.request_id for asked in ledger.acquired}) == 3
    assert all(asked.max_wait.seconds <= MAX_CALL_WAIT_SECONDS for asked in ledger.acquired)


def test_rejection_without_a_wait_is_final(ledger: Script) -> None:
    ledger.refusals = [WeftError(Reason.INSUFFICIENT_MEMORY, "the host has 16 GiB")]
    with pytest.raises(WeftError, match="the host has 16 GiB"), _hold(ledger, wait_seconds=1000):
        pass
    assert len(ledger.acquired) == 1


def test_rejection_without_a_wait_is_final_also_after_a_wait(ledger: Script) -> None:
    """Regression: the call was repeated without a pause until `wait_seconds` had passed."""
    ledger.waits = ["held by qwen"]
    ledger.refusals = [
        WeftError(Reason.INSUFFICIENT_MEMORY, words) for words in ("the wait timed out", "the host has 16 GiB")
    ]

    def wait_once(_: str) -> None:
        ledger.waits = []

    refused = pytest.raises(WeftError, match="the host has 16 GiB")
    with refused, _hold(ledger, wait_seconds=1000, on_waiting=wait_once):
        pass
    assert len(ledger.acquired) == 2


def test_wait_resumes_for_the_same_lease_after_the_mesh_returns(ledger: Script) -> None:
    ledger.waits = ["held by qwen"]
    ledger.refusals = [WeftError(Reason.SERVICE_UNAVAILABLE, "the registry restarts")]
    told: list[str] = []
    with _hold(ledger, on_waiting=told.append):
        assert len({asked.request_id for asked in ledger.acquired}) == 1
    assert "trying again" in told[1]


def test_unresponsive_mesh_is_reported_immediately() -> None:
    with pytest.raises(WeftError) as refused, hold_memory("1GiB", target="127.0.0.1:1", observer=HostObserver()):
        pass
    assert refused.value.reason in (Reason.SERVICE_UNAVAILABLE, Reason.NOT_FOUND)


def test_host_without_devices_is_rejected_with_a_fix(ledger: Script) -> None:
    with (
        pytest.raises(WeftError, match=r"accelerators\.declared") as refused,
        _hold(ledger, observer=HostObserver(reader=Cards(()))),
    ):
        pass
    assert refused.value.reason is Reason.NOT_FOUND
    assert ledger.acquired == []


def test_declared_devices_come_from_the_ledger_and_are_not_hidden(ledger: Script) -> None:
    host = HostObserver().host
    device = lease_pb2.Device(index=0, id="declared-0", name="Radeon", total_bytes=GIB)
    ledger.known_hosts = [
        lease_service_pb2.HostMemory(
            host=host,
            source=lease_pb2.HostSighting.SOURCE_DECLARED,
            devices=[lease_service_pb2.DeviceMemory(device=device)],
        )
    ]
    with hold_memory(GIB // 2, target=ledger.target) as lease:
        assert lease.environment() == {}
    (asked,) = ledger.acquired
    assert asked.sighting.source == lease_pb2.HostSighting.SOURCE_DECLARED
    assert [one.name for one in asked.sighting.devices] == ["Radeon"]
    with _hold(ledger, observer=HostObserver(declared=declared_snapshots([("x", 5)]))):
        assert ledger.acquired[-1].sighting.devices[0].total_bytes == 5


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"priority": "urgent"}, "priority"),
        ({"purpose": "p" * 257}, "purpose"),
        ({"devices": [0, 0]}, "devices"),
        ({"devices": [-1]}, "devices"),
        ({"devices": [64]}, "devices"),
        ({"max_devices": 65}, "max_devices"),
        ({"wait_seconds": -1}, "wait_seconds"),
        ({"wait_seconds": 1e9}, "wait_seconds"),
        ({"wait_seconds": float("nan")}, "wait_seconds"),
        ({"memory": "8 things"}, "memory"),
        ({"memory": -8}, "memory"),
        ({"memory": True}, "memory"),
    ],
)
def test_invalid_option_is_reported_before_any_request(ledger: Script, options: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as refused, _hold(ledger, **options):
        pass
    assert refused.value.field == field
    assert ledger.acquired == []


@pytest.mark.parametrize("program", ["train.py", "/usr/bin/python3", "", "--", "a b/ü ß", "x" * 300, "."])
def test_program_name_is_always_valid_for_the_ledger(program: str) -> None:
    name = program_name(program)
    assert 0 < len(name) <= 128
    assert name[0].isalnum()
    assert name.isascii()
