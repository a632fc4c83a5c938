"""The observer of a host's accelerators, for the lease managers of runners and commands."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from weft.gpu.nvml import Health, NvmlReader, NvmlReading
from weft.gpu.process import is_alive
from weft.gpu.snapshot import (
    MAX_DEVICES,
    MAX_PROCESSES,
    DeviceSnapshot,
    HostSnapshot,
    ProcessId,
    ProcessSnapshot,
    Source,
)

HANG_SECONDS = 10.0
"""A call that takes longer counts as hung."""


class SingleFlightThread:
    """Runs one job at a time in a daemon thread. A hanging job blocks further ones, but no caller."""

    def __init__(self, name: str, monotonic_seconds: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._now = monotonic_seconds
        self._lock = threading.Lock()
        self._since: float | None = None
        self._end_listeners: list[Callable[[], None]] = []

    def is_alive(self) -> bool:
        """Whether a job runs."""
        return self._since is not None

    def is_hung(self) -> bool:
        """Whether a job has run for HANG_SECONDS or longer."""
        since = self._since
        return since is not None and self._now() - since >= HANG_SECONDS

    def start_or_join(self, job: Callable[[], None], on_end: Callable[[], None] | None = None) -> None:
        """Runs `job`, which must not raise, unless a job is running. Calls `on_end` in its thread when it has ended."""
        with self._lock:
            if on_end is not None:
                self._end_listeners.append(on_end)
            if self._since is None:
                # At the limit of processes, the next call tries again.
                with suppress(RuntimeError):
                    threading.Thread(target=self._run, args=(job,), name=self._name, daemon=True).start()
                    self._since = self._now()

    def _run(self, job: Callable[[], None]) -> None:
        job()
        with self._lock:
            self._since = None
            told, self._end_listeners = self._end_listeners, []
        for tell in told:
            tell()


POLL_SECONDS = 1.0
"""Maximum age of a reading, unless a fresh one is requested."""


class Reader(Protocol):
    """A reader of devices, such as NvmlReader."""

    def read(self) -> NvmlReading:
        """Returns a reading. Never raises; may hang."""
        ...


def declared_snapshots(devices: Sequence[tuple[str, int]]) -> tuple[DeviceSnapshot, ...]:
    """Returns devices that an operator declares by name and bytes, because no library reports them, in this order."""
    return tuple(
        DeviceSnapshot(index=index, id=f"declared-{index}", name=name, total_bytes=total_bytes)
        for index, (name, total_bytes) in enumerate(devices[:MAX_DEVICES])
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    reading: NvmlReading
    begun: float


class HostObserver:
    """Observes the devices of this host, their use, and the processes that hold their memory. Never raises.

    On a host with declared devices, nothing is read. With NVIDIA's library, the source is `Source.NVML`; without it,
    too, since the host certainly has no devices. While the library fails or hangs, the source is UNKNOWN, with the last
    known sizes.
    """

    def __init__(
        self,
        *,
        declared: Sequence[DeviceSnapshot] = (),
        reader: Reader | None = None,
        host: str | None = None,
        poll_interval_seconds: float = POLL_SECONDS,
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """`declared` devices replace all of the host's; without them `reader` (default: NVML) is used."""
        self._host = host or socket.gethostname()
        self._declared = tuple(declared)
        self._reader = reader or NvmlReader()
        self._poll_interval_seconds = poll_interval_seconds
        self._now = monotonic_seconds
        self._thread = SingleFlightThread("gpu-memory", monotonic_seconds)
        self._last: _Timed | None = None
        self._known_devices: tuple[DeviceSnapshot, ...] = ()

    @property
    def host(self) -> str:
        """The host name."""
        return self._host

    async def look(self, watched: Collection[ProcessId] = (), *, fresh: bool = False) -> HostSnapshot:
        """Returns a snapshot with all processes of `watched` and all that hold memory, within HANG_SECONDS.

        `fresh` requires a reading that begins after this call.
        """
        wanted = self._wanted_since(fresh=fresh)
        loop = asyncio.get_running_loop()
        with suppress(TimeoutError):
            async with asyncio.timeout(HANG_SECONDS):
                while self._needs_reading(wanted):
                    read = asyncio.Event()
                    self._begin(_from_another_thread(loop, read))
                    await read.wait()
        return self._snapshot(watched, wanted)

    def look_blocking(self, watched: Collection[ProcessId] = (), *, fresh: bool = False) -> HostSnapshot:
        """As `look`, for programs without an event loop."""
        wanted = self._wanted_since(fresh=fresh)
        deadline = time.monotonic() + HANG_SECONDS
        while self._needs_reading(wanted) and (left := deadline - time.monotonic()) > 0:
            read = threading.Event()
            self._begin(read.set)
            read.wait(left)
        return self._snapshot(watched, wanted)

    def _wanted_since(self, *, fresh: bool) -> float:
        return self._now() if fresh else self._now() - self._poll_interval_seconds

    def _needs_reading(self, wanted_since: float) -> bool:
        if self._declared:
            return False
        last = self._last
        return (last is None or last.begun < wanted_since) and not self._thread.is_hung()

    def _begin(self, on_end: Callable[[], None]) -> None:
        """Calls `on_end` when the current reading, or a new one, has ended."""
        begun = self._now()
        self._thread.start_or_join(lambda: self._read(begun), on_end)

    def _read(self, begun: float) -> None:
        self._last = _Timed(reading=self._reader.read(), begun=begun)

    def _snapshot(self, watched: Collection[ProcessId], wanted_since: float) -> HostSnapshot:
        if self._declared:
            return self._unknown_use(Source.DECLARED, self._declared, watched)
        last = self._last
        is_current = last is not None and last.begun >= wanted_since
        if last is None or not is_current or last.reading.health is Health.FAILED:
            return self._unknown_use(Source.UNKNOWN, self._known_devices, watched)
        reading = last.reading
        if reading.health is Health.WELL:
            self._known_devices = tuple(
                DeviceSnapshot(index=device.index, id=device.id, name=device.name, total_bytes=device.total_bytes)
                for device in reading.devices
            )
        elif self._known_devices:
            # The cards are still there: the driver is probably being replaced.
            return self._unknown_use(Source.UNKNOWN, self._known_devices, watched)
        return HostSnapshot(
            host=self._host,
            source=Source.NVML,
            devices=reading.devices,
            processes=_processes(reading, watched),
        )

    def _unknown_use(
        self, source: Source, devices: tuple[DeviceSnapshot, ...], watched: Collection[ProcessId]
    ) -> HostSnapshot:
        processes = (_unlisted(process, memory_unknown=True) for process in sorted(watched)[:MAX_PROCESSES])
        return HostSnapshot(host=self._host, source=source, devices=devices, processes=tuple(processes))


def _from_another_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> Callable[[], None]:
    def tell() -> None:
        # The loop may be closed by the time a hung library answers.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(event.set)

    return tell


def _processes(reading: NvmlReading, watched: Collection[ProcessId]) -> tuple[ProcessSnapshot, ...]:
    """Returns the watched processes, then others that hold memory, largest first, up to MAX_PROCESSES."""
    asked = sorted(set(watched))
    by_pid = {holder.process.pid: holder for holder in reading.holders if reading.names_processes}
    holders = {process: _holder_of(process, by_pid) for process in asked}
    told = {holder.process.pid for holder in holders.values() if holder is not None}
    # Skip ids of another PID namespace, and what is watched: the registry refuses a process that is reported twice.
    others = [
        holder
        for holder in reading.holders
        if holder.process.pid not in told
        and holder.process not in holders
        and (reading.names_processes or holder.alive)
    ]
    others.sort(key=lambda holder: -sum(amount for _, amount in holder.bytes_by_device))
    snapshots = [
        _unlisted(process, memory_unknown=not reading.names_processes)
        if (holder := holders[process]) is None
        else replace(holder, process=process, alive=is_alive(process))
        for process in asked
    ]
    return tuple([*snapshots, *others][:MAX_PROCESSES])


def _holder_of(process: ProcessId, by_pid: Mapping[int, ProcessSnapshot]) -> ProcessSnapshot | None:
    holder = by_pid.get(process.pid)
    # Memory listed under an unused id still belongs to the id's last process.
    return holder if holder is not None and (holder.process == process or not holder.alive) else None


def _unlisted(process: ProcessId, *, memory_unknown: bool) -> ProcessSnapshot:
    """Returns the snapshot of an unlisted process. An ended process holds no memory."""
    alive = is_alive(process)
    return ProcessSnapshot(process=process, alive=alive, memory_unknown=alive and memory_unknown)
