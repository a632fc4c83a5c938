"""The meter of a runner: accelerator samples, and the shares of requests in the devices' work.

`policy.device_shares` has the rule. Requests never wait for a sample: a share reflects the samples so far.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from runner_svc.memory.lease_manager import LOOK_FOR_DEVICES_SECONDS, Observer
from runner_svc.policy.device_shares import (
    DeviceSample,
    EngineCall,
    Gap,
    Share,
    mean_utilization,
    over_devices,
    shares_of_interval,
)
from runner_svc.waiting import event_within
from weft.api.common.v1 import receipt_pb2
from weft.api.registry.v1.lease_pb2 import Lease
from weft.gpu.snapshot import DeviceUse, HostSnapshot, ProcessId, Source
from weft.kernel.services.service_lifecycle import BackgroundLoop
from weft.kernel.time.clock import Clock

IDLE_SAMPLE_SECONDS = 5.0
"""Interval of samples while no engine is processing a request."""
MEAN_SECONDS = 60.0
"""Period of a device's mean utilization."""
MAX_SAMPLES = 240


@dataclass(slots=True, eq=False, kw_only=True)
class MeteredCall(EngineCall):
    """An engine call for a request, and its shares so far by device."""

    devices: tuple[int, ...]
    shares: dict[int, Share] = field(default_factory=dict)

    def share(self) -> Share:
        """Returns its total share over all devices, once it has ended."""
        seconds = 0.0 if self.ended is None else self.ended - self.began
        return over_devices(self.shares.get(index, Share()).known_for(seconds) for index in self.devices)


class DeviceMeter:
    """The running calls of a runner's engines, and the device samples."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._calls: list[MeteredCall] = []
        self._samples: dict[int, deque[DeviceSample]] = {}
        self.called = asyncio.Event()
        """Set while engines work on requests."""

    def samples(self, device: int) -> Sequence[DeviceSample]:
        """Returns the last samples of a device in order, at most MAX_SAMPLES."""
        return tuple(self._samples.get(device, ()))

    def begin(self, engine: str, devices: tuple[int, ...]) -> MeteredCall:
        """Begins to meter an engine call on at least one device; `end` ends it."""
        call = MeteredCall(engine=engine, devices=devices, began=self._clock.monotonic())
        self._calls.append(call)
        self.called.set()
        return call

    def end(self, call: MeteredCall) -> None:
        """Ends an engine call."""
        call.ended = self._clock.monotonic()
        if all(each.ended is not None for each in self._calls):
            self.called.clear()

    def note(self, samples: Mapping[int, DeviceSample]) -> None:
        """Adds the next sample of each device; a missing device was not observed, so its time is unsampled."""
        for index, sample in samples.items():
            kept = self._samples.setdefault(index, deque(maxlen=MAX_SAMPLES))
            if kept:
                self._charge(index, kept[-1], sample)
            kept.append(sample)
        for index in [index for index in self._samples if index not in samples]:
            del self._samples[index]
        # Calls that have ended only had a share in the interval that this sample closes.
        self._calls = [call for call in self._calls if call.ended is None]

    def figures(self) -> dict[int, DeviceUse]:
        """Returns the figures of each sampled device."""
        return {
            index: DeviceUse(
                mean_utilization=mean_utilization(samples, MEAN_SECONDS),
                bytes_by_model={name: amount for name, amount in samples[-1].memory.items() if name},
                foreign_bytes=samples[-1].memory.get("", 0),
            )
            for index, samples in self._samples.items()
        }

    def _charge(self, index: int, first: DeviceSample, last: DeviceSample) -> None:
        calls = [call for call in self._calls if index in call.devices]
        for call, share in shares_of_interval(first, last, calls).items():
            if call.ended is None:
                call.shares[index] = call.shares.get(index, Share()).plus(share)


class RequestMeter:
    """The calls of one request, on the devices that its engine holds: one after the other, each in a block."""

    def __init__(self, meter: DeviceMeter, engine: str, grant: Callable[[], Lease | None]) -> None:
        self._meter = meter
        self._engine = engine
        self._grant = grant
        self._calls: list[MeteredCall] = []
        """Those with devices."""
        self._running: MeteredCall | None = None

    def __enter__(self) -> None:
        if (grant := self._grant()) is None:
            return
        if devices := tuple(share.device_index for share in grant.shares if share.bytes):
            self._running = self._meter.begin(self._engine, devices)
            self._calls.append(self._running)

    def __exit__(self, *_: object) -> None:
        running, self._running = self._running, None
        if running is not None:
            self._meter.end(running)

    def usage(self) -> receipt_pb2.DeviceUsage | None:
        """Returns the share of the calls that have ended; None: the engine held no device."""
        if not self._calls:
            return None
        share = over_devices(call.share() for call in self._calls)
        usage = receipt_pb2.DeviceUsage(gap=receipt_pb2.DeviceUsage.Gap.ValueType(share.gap))
        if share.gap is Gap.NONE:
            usage.device_time.FromNanoseconds(int(share.seconds * 1e9))
            if share.millijoules is not None:
                usage.energy_millijoules = int(share.millijoules)
        return usage


class DeviceSampler(BackgroundLoop):
    """Samples the devices for a meter in a loop."""

    loop_name = "device-samples"

    def __init__(
        self,
        observer: Observer,
        meter: DeviceMeter,
        processes: Callable[[], Mapping[str, Sequence[ProcessId]]],
        clock: Clock,
        interval_seconds: float,
    ) -> None:
        """`processes`: those of each engine of the runner, by model. `interval_seconds`: while engines work."""
        self._observer = observer
        self._meter = meter
        self._processes = processes
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._engine_of: dict[ProcessId, str] = {}
        """The engine of each process that holds device memory; empty: not of this runner."""

    @override
    async def _run(self) -> None:
        while True:
            snapshot = await self._observer.look(fresh=True)
            self._meter.note(self._samples(snapshot))
            if snapshot.source is not Source.UNKNOWN and not _is_measured(snapshot):
                await self._clock.sleep(LOOK_FOR_DEVICES_SECONDS)
            elif self._meter.called.is_set():
                await self._clock.sleep(self._interval_seconds)
            else:
                await event_within(self._clock, IDLE_SAMPLE_SECONDS, self._meter.called)

    def _samples(self, snapshot: HostSnapshot) -> dict[int, DeviceSample]:
        if not _is_measured(snapshot):
            return {}
        self._learn([process.process for process in snapshot.processes])
        return device_samples(snapshot, self._engine_of, self._clock.monotonic())

    def _learn(self, present: Sequence[ProcessId]) -> None:
        """Finds the engines of new processes only, because listing an engine's processes takes milliseconds."""
        self._engine_of = {process: self._engine_of[process] for process in present if process in self._engine_of}
        unknown = [process for process in present if process not in self._engine_of]
        if unknown:
            ours = {process: engine for engine, each in self._processes().items() for process in each}
            self._engine_of |= {process: ours.get(process, "") for process in unknown}


def _is_measured(snapshot: HostSnapshot) -> bool:
    return snapshot.source is Source.NVML and bool(snapshot.devices)


def device_samples(snapshot: HostSnapshot, engine_of: Mapping[ProcessId, str], at: float) -> dict[int, DeviceSample]:
    """Returns a sample of each device; `engine_of`: empty for processes that are not this runner's."""
    memory: dict[int, dict[str, int | None]] = {device.index: {} for device in snapshot.devices}
    for process in snapshot.processes:
        engine, amounts = engine_of.get(process.process, ""), dict(process.bytes_by_device)
        # Memory of unknown size may be on any device.
        for index in memory if process.memory_unknown else amounts:
            before, amount = memory[index].get(engine, 0), amounts.get(index)
            memory[index][engine] = None if before is None or amount is None else before + amount
    return {
        device.index: DeviceSample(
            at=at,
            utilization=device.utilization,
            energy_millijoules=device.energy_millijoules,
            engines=frozenset(memory[device.index]) - {""},
            is_private="" not in memory[device.index],
            memory=memory[device.index],
        )
        for device in snapshot.devices
    }
