"""The observer over a scripted reader: what it keeps, when it looks anew, and what it says when nobody answers."""

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest
from kit.waiting import wait_until

from weft.gpu.nvml import Health, NvmlReading
from weft.gpu.observer import HANG_SECONDS, HostObserver, SingleFlightThread, declared_snapshots
from weft.gpu.process import process_id_of
from weft.gpu.snapshot import MAX_PROCESSES, DeviceSnapshot, ProcessId, ProcessSnapshot, Source

GIB = 1024**3
NOBODY = 2**22 + 5
CARD = DeviceSnapshot(index=0, id="GPU-0", name="Card", total_bytes=8 * GIB, used_bytes=GIB, utilization=0.5)
SIZE_ONLY = DeviceSnapshot(index=0, id="GPU-0", name="Card", total_bytes=8 * GIB)


def _me() -> ProcessId:
    found = process_id_of(os.getpid())
    assert found is not None
    return found


ME = _me()
DEAD = ProcessId(NOBODY, 7)
MINE = ProcessSnapshot(process=ME, alive=True, bytes_by_device=((0, GIB),))


class ScriptedReader:
    """Says what it is told to; blocks while `gate` is closed."""

    def __init__(self, *holders: ProcessSnapshot, names_processes: bool = True) -> None:
        self.reading = NvmlReading(
            health=Health.WELL, devices=(CARD,), holders=holders, names_processes=names_processes
        )
        self.count = 0
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    async def has_begun(self) -> None:
        """Return once a reading is under way that began after the gate was closed."""
        assert await asyncio.to_thread(self.begun.wait, 10.0)

    def close_gate(self) -> None:
        self.begun.clear()
        self.gate.clear()

    def read(self) -> NvmlReading:
        self.count += 1
        reading = self.reading
        self.begun.set()
        self.gate.wait(30.0)
        return reading


@pytest.fixture
def reader() -> Iterator[ScriptedReader]:
    made = ScriptedReader(MINE)
    yield made
    made.gate.set()


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_snapshot_is_cached_for_the_poll_interval_unless_a_fresh_one_is_requested(
    reader: ScriptedReader,
) -> None:
    clock = Time()
    observer = HostObserver(reader=reader, host="box", poll_interval_seconds=1.0, monotonic_seconds=clock)
    first = await observer.look()
    assert (first.host, first.source, first.devices) == ("box", Source.NVML, (CARD,))
    assert first.processes == (ProcessSnapshot(process=ME, alive=True, bytes_by_device=((0, GIB),)),)
    clock.now += 1.0
    await observer.look()
    assert reader.count == 1
    clock.now += 0.01
    await observer.look()
    assert reader.count == 2
    clock.now += 0.001
    await observer.look(fresh=True)
    assert reader.count == 3


async def test_fresh_snapshot_starts_after_its_request(reader: ScriptedReader) -> None:
    clock = Time()
    observer = HostObserver(reader=reader, monotonic_seconds=clock)
    reader.close_gate()
    early = asyncio.create_task(observer.look())
    await reader.has_begun()
    clock.now += 0.5
    reader.reading = NvmlReading(health=Health.WELL, devices=(CARD,), names_processes=True)
    late = [asyncio.create_task(observer.look(fresh=True)) for _ in range(5)]
    await asyncio.sleep(0)
    reader.gate.set()
    assert (await early).processes
    assert [sight.processes for sight in await asyncio.gather(*late)] == [()] * 5
    assert reader.count == 2, "all of them share one reading"


async def test_observing_does_not_block_the_loop_and_cancellation_stops_no_read(reader: ScriptedReader) -> None:
    observer = HostObserver(reader=reader)
    reader.close_gate()
    look = asyncio.create_task(observer.look())
    await reader.has_begun()
    look.cancel()
    with pytest.raises(asyncio.CancelledError):
        await look
    reader.gate.set()
    assert (await observer.look()).source is Source.NVML


async def test_hanging_library_keeps_sizes_and_liveness_and_blocks_only_one_thread(
    reader: ScriptedReader,
) -> None:
    clock = Time()
    observer = HostObserver(reader=reader, monotonic_seconds=clock)
    await observer.look()
    reader.close_gate()
    clock.now += 2.0
    stuck = asyncio.create_task(observer.look())
    await reader.has_begun()
    threads = threading.active_count()
    clock.now += HANG_SECONDS
    for _ in range(5):
        sight = await observer.look([ME, DEAD], fresh=True)
        assert (sight.source, sight.devices) == (Source.UNKNOWN, (SIZE_ONLY,))
        assert sight.processes == (
            ProcessSnapshot(process=ME, alive=True, memory_unknown=True),
            ProcessSnapshot(process=DEAD, alive=False),
        )
    assert threading.active_count() == threads
    reader.gate.set()
    await stuck
    assert (await observer.look(fresh=True)).source is Source.NVML, "known again"


async def test_failing_library_keeps_the_last_seen_sizes(reader: ScriptedReader) -> None:
    observer = HostObserver(reader=reader, poll_interval_seconds=0.0)
    await observer.look()
    for health in (Health.FAILED, Health.ABSENT):
        reader.reading = NvmlReading(health=health)
        sight = await observer.look([ME], fresh=True)
        assert (sight.source, sight.devices) == (Source.UNKNOWN, (SIZE_ONLY,))
        assert sight.processes[0].memory_unknown


async def test_host_without_a_driver_is_known_to_have_no_devices(reader: ScriptedReader) -> None:
    reader.reading = NvmlReading(health=Health.ABSENT)
    sight = await HostObserver(reader=reader).look([DEAD])
    assert (sight.source, sight.devices) == (Source.NVML, ())


async def test_library_failing_from_the_start_is_unknown_and_not_zero_devices(reader: ScriptedReader) -> None:
    reader.reading = NvmlReading(health=Health.FAILED)
    assert (await HostObserver(reader=reader).look()).source is Source.UNKNOWN


async def test_watched_processes_are_reported_even_without_memory() -> None:
    later = ProcessId(ME.pid, ME.start_ticks + 1)
    sight = await HostObserver(reader=ScriptedReader(MINE)).look([DEAD, later, ME])
    assert {one.process: (one.alive, one.bytes_by_device) for one in sight.processes} == {
        ME: (True, ((0, GIB),)),
        later: (False, ()),
        DEAD: (False, ()),
    }, "a number that was used again is not the old process"


async def test_memory_of_an_exited_pid_is_attributed_to_its_last_owner() -> None:
    ghost = ProcessSnapshot(process=ProcessId(NOBODY, 0), alive=False, bytes_by_device=((0, 5),))
    observer = HostObserver(reader=ScriptedReader(MINE, ghost))
    told = {one.process: one for one in (await observer.look([DEAD])).processes}
    assert told[DEAD] == ProcessSnapshot(process=DEAD, alive=False, bytes_by_device=((0, 5),))
    assert ProcessId(NOBODY, 0) not in told, "once is enough"
    told = {one.process: one for one in (await observer.look()).processes}
    assert told[ProcessId(NOBODY, 0)].bytes_by_device == ((0, 5),)


async def test_pids_of_another_namespace_make_memory_unknown_and_not_zero() -> None:
    foreign = ProcessSnapshot(process=ProcessId(NOBODY, 0), alive=False, bytes_by_device=((0, 5),))
    reader = ScriptedReader(foreign, names_processes=False)
    sight = await HostObserver(reader=reader).look([ME, DEAD])
    assert sight.processes == (
        ProcessSnapshot(process=ME, alive=True, memory_unknown=True),
        ProcessSnapshot(process=DEAD, alive=False),
    )
    assert sight.devices[0].used_bytes == GIB


async def test_watched_process_is_reported_once_if_only_some_cards_list_their_processes() -> None:
    """Regression: it was reported twice, so the registry refused each report and renewal of the host."""
    sight = await HostObserver(reader=ScriptedReader(MINE, names_processes=False)).look([ME])
    assert [(one.process, one.memory_unknown) for one in sight.processes] == [(ME, True)]


async def test_excess_processes_drop_the_smallest_and_never_a_watched_one() -> None:
    holders = [
        ProcessSnapshot(process=ProcessId(pid, 1), alive=True, bytes_by_device=((0, pid),))
        for pid in range(1, MAX_PROCESSES + 10)
    ]
    sight = await HostObserver(reader=ScriptedReader(*holders)).look([DEAD])
    assert len(sight.processes) == MAX_PROCESSES
    told = {one.process.pid for one in sight.processes}
    assert DEAD.pid in told
    assert MAX_PROCESSES + 9 in told
    assert 1 not in told


async def test_declared_devices_are_reported_without_reading_the_library(reader: ScriptedReader) -> None:
    declared = declared_snapshots([("Radeon", GIB), ("RAM", 5)])
    sight = await HostObserver(declared=declared, reader=reader).look([ME, DEAD], fresh=True)
    assert sight.source is Source.DECLARED
    assert [(one.index, one.id, one.total_bytes, one.used_bytes) for one in sight.devices] == [
        (0, "declared-0", GIB, None),
        (1, "declared-1", 5, None),
    ]
    assert [(one.alive, one.memory_unknown) for one in sight.processes] == [(True, True), (False, False)]
    assert reader.count == 0


def test_concurrent_observing_threads_all_get_a_result(reader: ScriptedReader) -> None:
    observer = HostObserver(reader=reader, poll_interval_seconds=0.0)
    sources: list[Source] = []

    def look() -> None:
        sources.extend(observer.look_blocking(fresh=True).source for _ in range(200))

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert sources == [Source.NVML] * 1600


def test_single_flight_thread_runs_one_job_and_notifies_all_waiters() -> None:
    lone, gate = SingleFlightThread("lone"), threading.Event()
    ran: list[str] = []
    told: list[int] = []

    def first() -> None:
        gate.wait(10.0)
        ran.append("first")

    lone.start_or_join(first, lambda: told.append(1))
    lone.start_or_join(lambda: ran.append("second"), lambda: told.append(2))
    assert lone.is_alive()
    gate.set()
    wait_until(lambda: told == [1, 2])
    assert ran == ["first"]
    lone.start_or_join(lambda: ran.append("third"))
    wait_until(lambda: ran == ["first", "third"] and not lone.is_alive())


def test_single_flight_thread_that_cannot_start_now_starts_with_the_next_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    lone, told = SingleFlightThread("lone"), threading.Event()
    with monkeypatch.context() as limit:
        limit.setattr(threading.Thread, "start", refuse)
        lone.start_or_join(lambda: None, told.set)
    assert not lone.is_alive()
    lone.start_or_join(lambda: None)
    assert told.wait(10.0)
