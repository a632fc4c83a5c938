"""The meter of a runner over a scripted observer: what requests are charged, and what the loop costs."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Self

import pytest

from runner_svc.memory.device_meter import (
    IDLE_SAMPLE_SECONDS,
    MAX_SAMPLES,
    DeviceMeter,
    DeviceSampler,
    RequestMeter,
    device_samples,
)
from runner_svc.memory.lease_manager import LOOK_FOR_DEVICES_SECONDS
from runner_svc.policy.device_shares import DeviceSample
from weft.api.common.v1.receipt_pb2 import DeviceUsage
from weft.api.registry.v1.lease_pb2 import DeviceBytes, Lease
from weft.gpu.snapshot import DeviceSnapshot, HostSnapshot, ProcessId, ProcessSnapshot, Source
from weft_testing.fake_clock import FakeClock, let_all_run

GIB = 1024**3
ENGINE, CHILD, FOREIGN = ProcessId(10, 1), ProcessId(11, 2), ProcessId(99, 3)
GRANT = Lease(lease_id="a", shares=[DeviceBytes(device_index=0, bytes=GIB)])


def holder(process: ProcessId, amount: int = GIB, *, unknown: bool = False) -> ProcessSnapshot:
    held = () if unknown else ((0, amount),)
    return ProcessSnapshot(process=process, alive=True, bytes_by_device=held, memory_unknown=unknown)


def host(*holders: ProcessSnapshot, source: Source = Source.NVML, **figures: Any) -> HostSnapshot:
    device = DeviceSnapshot(index=0, id="GPU-0", name="Card", total_bytes=8 * GIB, **figures)
    return HostSnapshot(host="box", source=source, devices=(device,), processes=holders)


class ScriptedObserver:
    def __init__(self, snapshot: HostSnapshot) -> None:
        self.snapshot = snapshot
        self.looks = 0

    async def look(self, watched: Collection[ProcessId] = (), *, fresh: bool = False) -> HostSnapshot:
        assert fresh
        assert not watched
        self.looks += 1
        return self.snapshot


class Stage:
    """A sampler over a scripted observer, on a clock that the test steps."""

    def __init__(self, snapshot: HostSnapshot, processes: Mapping[str, tuple[ProcessId, ...]] | None = None) -> None:
        self.clock = FakeClock()
        self.observer = ScriptedObserver(snapshot)
        self.meter = DeviceMeter(self.clock)
        self.lists = 0
        self._engines = {"tiny": (ENGINE, CHILD)} if processes is None else dict(processes)
        self.sampler = DeviceSampler(self.observer, self.meter, self._list, self.clock, 0.25)

    def _list(self) -> Mapping[str, tuple[ProcessId, ...]]:
        self.lists += 1
        return self._engines

    def request(self, grant: Lease | None = GRANT, engine: str = "tiny") -> RequestMeter:
        return RequestMeter(self.meter, engine, lambda: grant)

    async def __aenter__(self) -> Self:
        await self.sampler.start()
        await let_all_run()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.sampler.stop()

    async def step(self, seconds: float = 0.25, **figures: Any) -> None:
        device = replace(self.observer.snapshot.devices[0], **figures)
        self.observer.snapshot = replace(self.observer.snapshot, devices=(device,))
        await self.clock.advance(seconds)
        await let_all_run()


async def test_request_has_its_share_of_time_and_energy() -> None:
    async with Stage(host(holder(ENGINE), energy_millijoules=1_000)) as stage:
        request = stage.request()
        with request:
            await let_all_run()
            for count in range(1, 9):
                await stage.step(utilization=0.5, energy_millijoules=1_000 + 100 * count)
        usage = request.usage()
    assert usage is not None
    assert (usage.device_time.ToMilliseconds(), usage.energy_millijoules) == (1_000, 800)
    assert usage.gap == DeviceUsage.GAP_UNSPECIFIED


async def test_request_without_a_lease_has_no_usage_and_starts_no_sampler() -> None:
    async with Stage(host(holder(ENGINE), utilization=1.0)) as stage:
        request = stage.request(grant=None)
        with request:
            await let_all_run()
            assert not stage.meter.called.is_set()
        assert request.usage() is None


@pytest.mark.parametrize(
    ("snapshot", "gap"),
    [
        (host(holder(ENGINE), holder(FOREIGN), utilization=1.0), DeviceUsage.GAP_FOREIGN_PROCESS),
        (host(holder(ENGINE), holder(FOREIGN, unknown=True), utilization=1.0), DeviceUsage.GAP_FOREIGN_PROCESS),
        (host(utilization=1.0), DeviceUsage.GAP_FOREIGN_PROCESS),
        (host(holder(ENGINE)), DeviceUsage.GAP_NOT_SAMPLED),
        (host(holder(ENGINE), utilization=1.0, source=Source.UNKNOWN), DeviceUsage.GAP_NOT_SAMPLED),
        (host(holder(ENGINE), utilization=1.0, source=Source.DECLARED), DeviceUsage.GAP_NOT_SAMPLED),
    ],
    ids=["foreign", "foreign of unknown memory", "hidden processes", "no utilization", "hung", "declared"],
)
async def test_unmeasurable_usage_is_unknown_and_never_zero(snapshot: HostSnapshot, gap: int) -> None:
    async with Stage(snapshot) as stage:
        request = stage.request()
        with request:
            await let_all_run()
            for _ in range(8):
                await stage.step()
        usage = request.usage()
    assert usage is not None
    assert usage.gap == gap
    assert not usage.HasField("device_time")
    assert not usage.HasField("energy_millijoules")


async def test_time_between_the_turns_of_a_request_is_not_charged() -> None:
    async with Stage(host(holder(ENGINE), utilization=1.0, energy_millijoules=0)) as stage:
        request = stage.request()
        for _ in range(2):
            with request:
                await let_all_run()
                for _ in range(4):
                    await stage.step()
            await stage.step(IDLE_SAMPLE_SECONDS)
        usage = request.usage()
    assert usage is not None
    assert usage.device_time.ToMilliseconds() == 2_000


async def test_idle_runner_samples_rarely_and_lists_processes_once() -> None:
    async with Stage(host(holder(ENGINE), holder(FOREIGN), utilization=0.0)) as stage:
        assert (stage.observer.looks, stage.lists) == (1, 1)
        await stage.step(IDLE_SAMPLE_SECONDS - 0.1)
        assert stage.observer.looks == 1
        await stage.step(0.1)
        assert (stage.observer.looks, stage.lists) == (2, 1)
        with stage.request():
            await let_all_run()
            assert stage.observer.looks == 3, "at once"
            await stage.step()
            assert (stage.observer.looks, stage.lists) == (4, 1)
        stage.observer.snapshot = replace(stage.observer.snapshot, processes=(holder(CHILD), holder(FOREIGN)))
        await stage.step()
        assert stage.lists == 2, "a new process"


async def test_host_without_a_driver_is_checked_once_a_minute() -> None:
    async with Stage(HostSnapshot(host="box", source=Source.NVML)) as stage:
        with stage.request():
            await stage.clock.advance(LOOK_FOR_DEVICES_SECONDS - 1.0)
            await let_all_run()
            assert stage.observer.looks == 1
            await stage.clock.advance(1.0)
            await let_all_run()
            assert stage.observer.looks == 2


def test_history_is_bounded() -> None:
    meter = DeviceMeter(FakeClock())
    for at in range(MAX_SAMPLES + 10):
        meter.note({0: DeviceSample(at=float(at), utilization=0.5)})
    assert len(meter.samples(0)) == MAX_SAMPLES
    assert meter.figures()[0].mean_utilization == pytest.approx(0.5)
    meter.note({})
    assert not meter.samples(0), "a device that is not seen has no history: the time between is not known"


def test_memory_is_split_by_model_and_foreign() -> None:
    seen = host(holder(ENGINE, 3), holder(CHILD, 4), holder(FOREIGN, 5))
    (sample,) = device_samples(seen, {ENGINE: "tiny", CHILD: "tiny", FOREIGN: ""}, 1.0).values()
    assert sample.memory == {"tiny": 7, "": 5}
    (sample,) = device_samples(host(holder(ENGINE, unknown=True)), {ENGINE: "tiny"}, 1.0).values()
    assert sample.memory == {"tiny": None}
    assert (sample.engines, sample.is_private) == (frozenset({"tiny"}), True)
