"""Values of the VRAM ledger, with what a test does not care about filled in."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from registry_svc.ledger.policy.device_memory import DeviceAccount
from registry_svc.ledger.policy.leases import Grant, Holder, HolderKind, Lease, LeaseState, MemoryRequest, Shares
from weft.gpu.snapshot import DeviceSnapshot, HostSnapshot, ProcessId, ProcessSnapshot, Source
from weft.kernel.requests.request_values import Priority

GIB = 1024**3
MARGIN = GIB // 2
START = datetime(2026, 1, 1, tzinfo=UTC)


def runner(name: str = "r1", life: str = "life-1") -> Holder:
    return Holder(kind=HolderKind.RUNNER, name=name, incarnation=life)


def program(name: str = "train") -> Holder:
    return Holder(kind=HolderKind.PROGRAM, name=name, incarnation="life-1")


def process(pid: int) -> ProcessId:
    return ProcessId(pid, pid * 10)


def lease(number: int, *shares: tuple[int, int], holder: Holder | None = None, **known: Any) -> Lease:
    """An idle model, loaded, on 1 GiB of device 0; `used` is when it last worked, in seconds after the start."""
    used = known.pop("used", 0)
    grant = Grant(
        id=f"lease-{number}",
        fencing_number=number,
        request_id=f"request-{number}",
        host="host-a",
        holder=holder or runner(),
        purpose=f"m{number}",
        shares=shares or ((0, GIB),),
        pinned=False,
        priority=Priority.NORMAL,
        created_at=START,
        processes=known.pop("processes", ()),
    )
    facts = {"state": LeaseState.HELD, "renewed": 0.0, "filled": True, "last_used_at": START + timedelta(seconds=used)}
    return Lease(grant=grant, **{**facts, **known})


def wish(size: int, number: int = 1, **asked: Any) -> MemoryRequest:
    facts = {
        "key": f"wish-{number}",
        "request_id": f"wish-{number}",
        "holder": runner("asks"),
        "purpose": f"wanted-{number}",
        "host": "host-a",
        "arrival": number,
        "deadline": 1e9,
    }
    return MemoryRequest(size=size, **{**facts, **asked})


def device(index: int, free: int, *, booked: int = 0) -> DeviceAccount:
    """One with exactly so much room."""
    return DeviceAccount(index=index, total=free + booked + MARGIN, margin=MARGIN, booked=booked, held=booked)


def snapshot(
    *totals: int,
    used: Iterable[int | None] | None = None,
    processes: Iterable[ProcessSnapshot] = (),
    source: Source = Source.NVML,
) -> HostSnapshot:
    """Devices of these sizes; nothing is in use unless it is said."""
    uses = [0] * len(totals) if used is None else list(used)
    devices = tuple(
        DeviceSnapshot(index=index, id=f"GPU-{index}", name="gpu", total_bytes=total, used_bytes=uses[index])
        for index, total in enumerate(totals)
    )
    return HostSnapshot(host="host-a", source=source, devices=devices, processes=tuple(processes))


def holding(pid: int, *held: tuple[int, int]) -> ProcessSnapshot:
    return ProcessSnapshot(process=process(pid), alive=True, bytes_by_device=held)


def ended(pid: int) -> ProcessSnapshot:
    return ProcessSnapshot(process=process(pid), alive=False)


def ended_but_listed(pid: int, *held: tuple[int, int]) -> ProcessSnapshot:
    """Its memory is not back yet."""
    return ProcessSnapshot(process=process(pid), alive=False, bytes_by_device=held)


def unknown(pid: int) -> ProcessSnapshot:
    return ProcessSnapshot(process=process(pid), alive=True, memory_unknown=True)


def total_of(shares: Shares | None) -> int:
    assert shares is not None
    return sum(size for _, size in shares)
