"""Every limit of what a caller may send to the VRAM ledger."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from kit.refusals import refused
from ledger_values import lease

from registry_svc.ledger.policy.leases import Holder, HolderKind, Lease, MemoryRequest
from registry_svc.ledger.requests import (
    check_acquire,
    check_holder,
    check_renewal,
    holder_from,
    memory_request_from,
    renewed_with,
)
from registry_svc.registry_config import LedgerConfig
from weft.api.common.v1 import priority_pb2
from weft.api.registry.v1 import lease_pb2, lease_service_pb2
from weft.gpu.snapshot import (
    MAX_DEVICE_BYTES,
    MAX_DEVICES,
    DeviceSnapshot,
    HostSnapshot,
    ProcessId,
    ProcessSnapshot,
    Source,
    snapshot_from,
)
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.requests.request_values import Priority
from weft.kernel.schemas.field_rules import check_message

Acquire = lease_service_pb2.AcquireLeaseRequest
Renew = lease_service_pb2.RenewLeasesRequest
Change = Callable[[Any], Any]
MAX_BYTES = MAX_DEVICES * MAX_DEVICE_BYTES
NOW = 1_000.0


def holder() -> lease_pb2.LeaseHolder:
    return lease_pb2.LeaseHolder(kind=lease_pb2.LeaseHolder.KIND_RUNNER, name="r1", incarnation="life-1")


def seen_process(pid: int) -> lease_pb2.SeenProcess:
    memory = [lease_pb2.DeviceBytes(device_index=1, bytes=5), lease_pb2.DeviceBytes(device_index=0, bytes=7)]
    return lease_pb2.SeenProcess(process=lease_pb2.ProcessId(pid=pid, start_ticks=9), alive=True, memory=memory)


def sighting() -> lease_pb2.HostSighting:
    return lease_pb2.HostSighting(
        host="hôst a",
        source=lease_pb2.HostSighting.SOURCE_NVML,
        devices=[
            lease_pb2.Device(index=1, id="GPU-1", name="card", total_bytes=100),
            lease_pb2.Device(index=0, id="GPU-0", name="card", total_bytes=100, used_bytes=0, utilization=0.0),
        ],
        processes=[seen_process(7), seen_process(8)],
    )


def acquire() -> Acquire:
    return Acquire(
        request_id="once", holder=holder(), session_id="session", purpose="qwen", sighting=sighting(), bytes=50
    )


def renew() -> Renew:
    uses = [
        lease_service_pb2.LeaseUse(
            lease_id=f"lease-{number}", fencing_number=number, processes=[lease_pb2.ProcessId(pid=7, start_ticks=9)]
        )
        for number in (1, 2)
    ]
    return Renew(holder=holder(), session_id="session", leases=uses, sighting=sighting())


def wanted_by(request: Acquire) -> MemoryRequest:
    """What the ledger makes of a request that it accepts."""
    check_acquire(request)
    return memory_request_from(request, arrival=7, now=NOW, max_wait_seconds=300.0)


def used_by(request: Renew) -> Lease:
    """A lease after the first use of a renewal that the ledger accepts."""
    check_renewal(request)
    return renewed_with(lease(1), request.leases[0], NOW)


def test_request_round_trips_completely() -> None:
    request = acquire()
    request.device_indexes.extend([1, 0])
    request.max_devices = 2
    request.priority = priority_pb2.PRIORITY_HIGH
    request.max_wait.FromMilliseconds(2_500)
    request.pinned = True
    wanted = wanted_by(request)
    assert wanted.holder == Holder(kind=HolderKind.RUNNER, name="r1", incarnation="life-1")
    assert (wanted.request_id, wanted.host, wanted.purpose, wanted.size) == ("once", "hôst a", "qwen", 50)
    assert (wanted.device_indexes, wanted.max_devices) == (frozenset({0, 1}), 2)
    assert (wanted.priority, wanted.deadline, wanted.pinned) == (Priority.HIGH, NOW + 2.5, True)
    assert (wanted.arrival, wanted.key) == (7, "RUNNER\nr1\nlife-1\nonce")
    devices = (
        DeviceSnapshot(index=0, id="GPU-0", name="card", total_bytes=100, used_bytes=0, utilization=0.0),
        DeviceSnapshot(index=1, id="GPU-1", name="card", total_bytes=100),
    )
    processes = tuple(
        ProcessSnapshot(process=ProcessId(pid, 9), alive=True, bytes_by_device=((0, 7), (1, 5))) for pid in (7, 8)
    )
    assert snapshot_from(request.sighting) == HostSnapshot(
        host="hôst a", source=Source.NVML, devices=devices, processes=processes
    )


def test_unset_fields_have_defaults() -> None:
    wanted = wanted_by(acquire())
    assert (wanted.priority, wanted.deadline, wanted.pinned) == (Priority.NORMAL, NOW + 300.0, False)
    use = used_by(renew())
    assert (use.priority, use.last_used_at, use.filled) == (Priority.NORMAL, None, False)


def test_wait_is_capped_by_the_registry() -> None:
    request = acquire()
    request.max_wait.FromSeconds(301)
    assert wanted_by(request).deadline == NOW + 300.0


def test_use_round_trips_completely() -> None:
    request = renew()
    request.leases[0].filled = True
    request.leases[0].active_requests = 3
    request.leases[0].last_used_time.FromJsonString("2026-01-01T00:00:00Z")
    use = used_by(request)
    assert (use.grant.id, use.renewed, use.filled, use.active_requests) == ("lease-1", NOW, True, 3)
    assert use.named == frozenset({ProcessId(7, 9)})
    assert use.last_used_at == datetime(2026, 1, 1, tzinfo=UTC)


def set_field(path: str, value: Any) -> Change:
    """Sets `a.b[0].c`, with the message types of the contract."""

    def change(request: Any) -> None:
        *parents, last = path.replace("[", ".[").split(".")
        for name in parents:
            request = request[int(name[1:-1])] if name.startswith("[") else getattr(request, name)
        setattr(request, last, value)

    return change


def repeat(path: str, times: int) -> Change:
    """Fills a list with copies of its first member, or with zeros."""

    def change(request: Any) -> None:
        *parents, last = path.replace("[", ".[").split(".")
        for name in parents:
            request = request[int(name[1:-1])] if name.startswith("[") else getattr(request, name)
        members = getattr(request, last)
        members.extend([members[0] if members else 0] * times)

    return change


BOTH = [
    ("holder.kind", set_field("holder.kind", 0)),
    ("holder.kind", set_field("holder.kind", 9)),
    ("holder.name", set_field("holder.name", "two words")),
    ("holder.incarnation", set_field("holder.incarnation", "")),
    ("holder.incarnation", set_field("holder.incarnation", "x" * 129)),
    ("session_id", set_field("session_id", "two words")),
    ("sighting.host", set_field("sighting.host", "")),
    ("sighting.host", set_field("sighting.host", "x" * 254)),
    ("sighting.host", set_field("sighting.host", "a\nb")),
    ("sighting.source", set_field("sighting.source", 0)),
    ("sighting.source", set_field("sighting.source", 4)),
    ("sighting.devices", repeat("sighting.devices", 63)),
    ("sighting.devices[1].index", set_field("sighting.devices[1].index", 1)),
    ("sighting.devices[0].index", set_field("sighting.devices[0].index", -1)),
    ("sighting.devices[0].index", set_field("sighting.devices[0].index", 64)),
    ("sighting.devices[0].id", set_field("sighting.devices[0].id", "x" * 129)),
    ("sighting.devices[0].name", set_field("sighting.devices[0].name", "\x1b[31m")),
    ("sighting.devices[0].total_bytes", set_field("sighting.devices[0].total_bytes", 0)),
    ("sighting.devices[0].total_bytes", set_field("sighting.devices[0].total_bytes", MAX_DEVICE_BYTES + 1)),
    ("sighting.devices[0].used_bytes", set_field("sighting.devices[0].used_bytes", -1)),
    ("sighting.devices[0].utilization", set_field("sighting.devices[0].utilization", 1.01)),
    ("sighting.devices[0].utilization", set_field("sighting.devices[0].utilization", float("nan"))),
    ("sighting.processes", repeat("sighting.processes", 4_095)),
    ("sighting.processes[1].process", set_field("sighting.processes[1].process.pid", 7)),
    ("sighting.processes[0].process.pid", set_field("sighting.processes[0].process.pid", 0)),
    ("sighting.processes[0].process.start_ticks", set_field("sighting.processes[0].process.start_ticks", -1)),
    ("sighting.processes[0].memory", repeat("sighting.processes[0].memory", 63)),
    ("sighting.processes[0].memory[1].device_index", set_field("sighting.processes[0].memory[0].device_index", 0)),
    ("sighting.processes[0].memory[0].bytes", set_field("sighting.processes[0].memory[0].bytes", -1)),
]
ACQUIRE = [
    ("request_id", set_field("request_id", "")),
    ("request_id", set_field("request_id", "x" * 129)),
    ("purpose", set_field("purpose", "")),
    ("purpose", set_field("purpose", "two words")),
    ("purpose", set_field("purpose", "x" * 129)),
    ("bytes", set_field("bytes", 0)),
    ("bytes", set_field("bytes", -1)),
    ("bytes", set_field("bytes", MAX_BYTES + 1)),
    ("device_indexes", repeat("device_indexes", 65)),
    ("device_indexes", repeat("device_indexes", 2)),
    ("device_indexes[0]", lambda request: request.device_indexes.append(-1)),
    ("device_indexes[0]", lambda request: request.device_indexes.append(64)),
    ("max_devices", set_field("max_devices", -1)),
    ("max_devices", set_field("max_devices", 65)),
    ("priority", set_field("priority", 6)),
    ("max_wait", set_field("max_wait.seconds", -1)),
    ("max_wait", set_field("max_wait.seconds", 2**40)),
]
RENEW = [
    ("leases", repeat("leases", 1_023)),
    ("leases[1].lease_id", set_field("leases[1].lease_id", "lease-1")),
    ("leases[0].lease_id", set_field("leases[0].lease_id", "")),
    ("leases[0].fencing_number", set_field("leases[0].fencing_number", -1)),
    ("leases[0].processes", repeat("leases[0].processes", 256)),
    ("leases[0].processes[1].pid", repeat("leases[0].processes", 1)),
    ("leases[0].processes[0].pid", set_field("leases[0].processes[0].pid", -4)),
    ("leases[0].active_requests", set_field("leases[0].active_requests", -1)),
    ("leases[0].priority", set_field("leases[0].priority", 6)),
    ("leases[0].last_used_time", set_field("leases[0].last_used_time.seconds", 2**60)),
]


@pytest.mark.parametrize(("field", "change"), [*BOTH, *ACQUIRE])
def test_acquire_request_beyond_a_limit_is_refused_with_its_field(field: str, change: Change) -> None:
    request = acquire()
    check_acquire(request)
    change(request)
    with refused(field=field):
        check_acquire(request)


@pytest.mark.parametrize(("field", "change"), [*BOTH, *RENEW])
def test_renewal_beyond_a_limit_is_refused_with_its_field(field: str, change: Change) -> None:
    request = renew()
    check_renewal(request)
    change(request)
    with refused(field=field):
        check_renewal(request)


def test_program_may_choose_its_name_and_purpose_within_the_length_limit() -> None:
    request = acquire()
    request.holder.kind = lease_pb2.LeaseHolder.KIND_PROGRAM
    request.holder.name, request.purpose, request.session_id = "my training", "fine tuning " * 21, ""
    check_acquire(request)
    assert holder_from(request.holder) == Holder(kind=HolderKind.PROGRAM, name="my training", incarnation="life-1")
    for field, value in (("holder.name", ""), ("holder.name", "x" * 129), ("purpose", "x" * 257)):
        request = acquire()
        request.holder.kind = lease_pb2.LeaseHolder.KIND_PROGRAM
        set_field(field, value)(request)
        with pytest.raises(FieldError, match=field):
            check_acquire(request)


def test_invalid_release_error_names_the_field() -> None:
    good = lease_service_pb2.ReleaseLeaseRequest(holder=holder(), lease_id="lease-1", fencing_number=1)
    check_holder(good)
    for field, value in (("lease_id", ""), ("lease_id", "x" * 129), ("fencing_number", -1), ("holder.name", "")):
        request = lease_service_pb2.ReleaseLeaseRequest()
        request.CopyFrom(good)
        set_field(field, value)(request)
        with refused(field=field):
            check_holder(request)


def test_other_requests_are_validated_too() -> None:
    with pytest.raises(FieldError, match=r"holder\.kind"):
        check_holder(lease_service_pb2.ReleaseEarlierLivesRequest())
    with pytest.raises(FieldError, match="host"):
        check_message(lease_service_pb2.ListHostMemoryRequest(host="a\x00b"))
    check_message(lease_service_pb2.ListHostMemoryRequest(host="a"))


@pytest.mark.parametrize("name", LedgerConfig.__dataclass_fields__)
def test_invalid_settings_are_refused_by_name(name: str) -> None:
    values: list[Any] = [-1, float("nan"), float("inf")]
    for value in values:
        with refused(field=name):
            LedgerConfig(**{name: value})


def test_lease_ttl_must_exceed_the_renewal_interval() -> None:
    with pytest.raises(FieldError, match="lease_time_to_live_seconds"):
        LedgerConfig(lease_time_to_live_seconds=5.0)


@pytest.mark.parametrize("band", [Priority.SYSTEM, Priority.DURABLE])
def test_program_cannot_use_a_mesh_band_and_a_runner_may_load_in_it(band: Priority) -> None:
    request, renewal = acquire(), renew()
    request.priority = renewal.leases[0].priority = priority_pb2.Priority.ValueType(band.wire)
    assert wanted_by(request).priority is band
    assert used_by(renewal).priority is band
    for message in (request, renewal):
        message.holder.kind, message.session_id = lease_pb2.LeaseHolder.KIND_PROGRAM, ""
    with pytest.raises(FieldError, match="priority"):
        check_acquire(request)
    with pytest.raises(FieldError, match="priority"):
        check_renewal(renewal)
