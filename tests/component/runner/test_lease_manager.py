"""A runner's leases at a registry that answers, refuses, forgets and goes away."""

import asyncio
import gc
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from grpc.aio import UnaryStreamCall
from kit.failures import fails
from kit.presence import present
from kit.waiting import until
from scripted_leases import GIB, Holder, SeenHost, keeping, wish
from typing_extensions import override

from runner_svc.memory.lease_manager import (
    AWAY,
    DEFAULT_MARGIN_BYTES,
    LOOK_FOR_DEVICES_SECONDS,
    MAX_CONCURRENT_REQUESTS,
    NO_REGISTRY,
    NO_SNAPSHOT,
    OWN_QUEUE,
    LeaseManager,
)
from runner_svc.memory.machine_memory import machine_memory
from runner_svc.memory.port import leased_bytes
from weft.api.registry.v1 import lease_service_pb2 as pb
from weft.api.registry.v1.lease_pb2 import Lease
from weft.gpu.snapshot import HostSnapshot, ProcessId, Source
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import SystemClock
from weft_testing.fake_clock import FakeClock

AWAY_NOW = WeftError(Reason.SERVICE_UNAVAILABLE, "away")
ENGINE = ProcessId(4242, 99)
WORDS: list[str] = []


async def _granted(keeper: LeaseManager, holder: Holder, words: list[str] | None = None) -> Lease:
    heard = [] if words is None else words
    return present(await keeper.acquire(wish(), holder, heard.append))


async def test_host_without_devices_never_calls_the_registry(tmp_path: Path) -> None:
    host = SeenHost()
    async with keeping(tmp_path, host, SystemClock()) as (keeper, leases, _):
        assert await keeper.acquire(wish(), Holder(), WORDS.append) is None
        keeper.note_change()
        await until(lambda: len(host.asked_about) > 2)
        assert leases.calls == 0


async def test_lease_is_requested_for_the_runner_and_renewed_before_use(tmp_path: Path) -> None:
    async with keeping(tmp_path, SeenHost(8 * GIB, 8 * GIB), SystemClock(), devices=(1,)) as (keeper, leases, _):
        grant = await _granted(keeper, Holder())
        request = leases.asked[0]
        assert (request.holder.name, request.holder.incarnation, request.session_id) == ("r1", "life-1", "session-1")
        assert (request.purpose, request.bytes, list(request.device_indexes)) == ("m", GIB, [1])
        assert [device.index for device in request.sighting.devices] == [0, 1]
        assert len(leases.greetings) == 1, "earlier lives are over before anything is asked for"
        use = next(use for renewal in leases.renewals for use in renewal.leases if use.lease_id == grant.lease_id)
        assert (use.fencing_number, use.active_requests, use.pinned, use.filled) == (1, 2, True, False)
        assert keeper.is_good(grant)
        assert (leased_bytes(grant), keeper.hides_devices) == (GIB, True)


async def test_leasable_memory_excludes_the_margin_and_foreign_usage(tmp_path: Path) -> None:
    host = SeenHost(8 * GIB, 6 * GIB)
    async with keeping(tmp_path, host, SystemClock()) as (keeper, leases, _):
        leases.hosts = [pb.HostMemory(host=(await host.look()).host), pb.HostMemory(host="another")]
        for index, foreign in enumerate((GIB, None)):
            account = leases.hosts[0].devices.add(margin_bytes=GIB // 4, booked_bytes=5 * GIB, free_bytes=0)
            account.device.index = index
            if foreign is not None:
                account.foreign_bytes = foreign
        sizes = [(device.total_bytes, device.reserved_bytes) for device in await keeper.device_memory()]
        assert sizes == [(8 * GIB, GIB + GIB // 4), (6 * GIB, GIB // 4)], "leases can be evicted, and do not count"
        leases.hosts.clear()
        assert {device.reserved_bytes for device in await keeper.device_memory()} == {DEFAULT_MARGIN_BYTES}


async def test_runner_memory_counts_only_its_own_devices(tmp_path: Path) -> None:
    async with keeping(tmp_path, SeenHost(8 * GIB, 6 * GIB), SystemClock(), devices=(1,)) as (keeper, _, _):
        assert [device.total_bytes for device in await keeper.device_memory()] == [6 * GIB]
        memory = await machine_memory(keeper)
        assert (memory.all_devices_bytes, memory.host_bytes is None) == (6 * GIB - DEFAULT_MARGIN_BYTES, False)


async def test_declared_devices_are_not_hidden_from_an_engine(tmp_path: Path) -> None:
    async with keeping(tmp_path, SeenHost(8 * GIB, source=Source.DECLARED), SystemClock()) as (keeper, _, _):
        await _granted(keeper, Holder())
        assert not keeper.hides_devices


async def test_wait_reason_is_reported_on_change(tmp_path: Path) -> None:
    async with keeping(tmp_path, SeenHost(8 * GIB), SystemClock()) as (keeper, leases, _):
        leases.go.clear()
        words: list[str] = []
        waiting = asyncio.create_task(_granted(keeper, Holder(), words))
        await until(lambda: words)
        leases.go.set()
        await waiting
        assert words == ["waiting for memory: needs 1.0 GiB, held by qwen"]


async def test_cancelled_wait_leaves_the_queue_and_holds_nothing(tmp_path: Path) -> None:
    async with keeping(tmp_path, SeenHost(8 * GIB), SystemClock()) as (keeper, leases, _):
        leases.go.clear()
        waiting = asyncio.create_task(_granted(keeper, Holder()))
        await until(lambda: leases.asked)
        waiting.cancel()
        await until(lambda: leases.left == 1)
        assert keeper.held_bytes == 0


async def test_cancelling_a_wait_at_any_point_leaves_no_lease(tmp_path: Path) -> None:
    async with keeping(tmp_path, SeenHost(8 * GIB), SystemClock()) as (keeper, leases, _):
        for turns in range(0, 120, 3):
            waiting = asyncio.create_task(_granted(keeper, Holder()))
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            outcome = (await asyncio.gather(waiting, return_exceptions=True))[0]
            if isinstance(outcome, Lease):
                keeper.release(outcome)
            assert keeper.held_bytes == 0, f"cancelled after {turns} turns"
        confirmed = {use.lease_id for renewal in leases.renewals for use in renewal.leases}
        await until(lambda: confirmed <= {release.lease_id for release in leases.released})


async def test_lost_lease_is_reported_to_its_holder_immediately_and_no_longer_counts(tmp_path: Path) -> None:
    async with keeping(tmp_path, SeenHost(8 * GIB), SystemClock()) as (keeper, leases, _):
        holder = Holder()
        grant = await _granted(keeper, holder)
        leases.lost.add(grant.lease_id)
        keeper.note_change()
        await until(lambda: holder.lost)
        assert not keeper.is_good(grant)
        keeper.release(grant)
        assert keeper.held_bytes == 0
        assert leases.released == [], "what is somebody else's is not given up"


async def test_lease_lost_before_its_first_renewal_is_requested_again(tmp_path: Path) -> None:
    async with keeping(tmp_path, SeenHost(8 * GIB), SystemClock()) as (keeper, leases, _):
        leases.go.clear()
        holder = Holder()
        waiting = asyncio.create_task(_granted(keeper, holder))
        await until(lambda: leases.asked)
        leases.lost.add(leases.asked[0].request_id.replace("lease", "l"))
        leases.go.set()
        grant = await waiting
        assert (grant.fencing_number, len(leases.asked)) == (2, 2)
        assert leases.asked[0].request_id != leases.asked[1].request_id
        assert keeper.is_good(grant)


async def test_lease_validity_starts_when_its_renewal_was_sent(tmp_path: Path) -> None:
    clock = FakeClock()
    async with keeping(tmp_path, SeenHost(8 * GIB), clock) as (keeper, leases, session):
        grant = await _granted(keeper, Holder())
        renewed = clock.monotonic()
        session[0] = ""  # nothing is renewed from here on
        await clock.advance(29.9 - (clock.monotonic() - renewed))
        assert keeper.is_good(grant)
        await clock.advance(0.2)
        assert not keeper.is_good(grant), "the registry may have given it to somebody else by now"
        count = len(leases.renewals)
        session[0] = "session-1"
        keeper.note_change()
        await until(lambda: len(leases.renewals) > count)
        await until(lambda: keeper.is_good(grant))


async def test_unavailable_registry_is_awaited_with_one_queue_position(tmp_path: Path) -> None:
    async with keeping(tmp_path, SeenHost(8 * GIB), SystemClock()) as (keeper, leases, session):
        await until(lambda: leases.renewals)
        leases.failures = [AWAY_NOW, AWAY_NOW]
        words: list[str] = []
        await _granted(keeper, Holder(), words)
        assert words == [f"waiting for memory: {AWAY_NOW.message}"], "it answered"
        session[0], leases.go = "", leases.go
        waiting = asyncio.create_task(_granted(keeper, Holder(), words))
        await until(lambda: words[1:] == [NO_REGISTRY])
        session[0] = "session-2"
        await waiting
        assert leases.asked[-1].session_id == "session-2"


async def test_interrupted_request_is_retried_with_the_same_id(tmp_path: Path) -> None:
    async with keeping(tmp_path, SeenHost(8 * GIB), SystemClock()) as (keeper, leases, _):
        leases.go.clear()
        leases.ends_after_words = True
        waiting = asyncio.create_task(_granted(keeper, Holder()))
        await until(lambda: len(leases.asked) == 2)
        leases.go.set()
        await waiting
        assert len({request.request_id for request in leases.asked}) == 1


@pytest.mark.parametrize("away", [True, False])
async def test_wait_times_out(away: bool, tmp_path: Path) -> None:
    clock = FakeClock()
    async with keeping(tmp_path, SeenHost(8 * GIB), clock) as (keeper, leases, session):
        await until(lambda: leases.renewals)
        leases.go.clear()
        words: list[str] = []
        if away:
            session[0] = ""
        waiting = asyncio.create_task(_granted(keeper, Holder(), words))
        await until(lambda: words)
        await clock.advance(61.0)
        with pytest.raises(WeftError) as refused:
            await waiting
        if away:
            assert refused.value.reason is Reason.SERVICE_UNAVAILABLE
        else:
            assert refused.value.reason is Reason.INSUFFICIENT_MEMORY
            assert refused.value.retry_after_seconds is not None, "it may be there later"
            assert refused.value.message == "m got no memory within 60 s: needs 1.0 GiB, held by qwen"
        assert keeper.held_bytes == 0


async def test_rejection_is_passed_through_unchanged(tmp_path: Path) -> None:
    async with keeping(tmp_path, SeenHost(8 * GIB), SystemClock()) as (keeper, leases, _):
        await until(lambda: leases.renewals)
        leases.failures = [WeftError(Reason.INSUFFICIENT_MEMORY, "needs 99 GiB; h has 8 GiB")]
        with fails(Reason.INSUFFICIENT_MEMORY, match="needs 99 GiB; h has 8 GiB") as refused:
            await _granted(keeper, Holder())
        assert refused.value.reason not in AWAY


async def test_devices_not_yet_visible_are_awaited(tmp_path: Path) -> None:
    host = SeenHost(source=Source.UNKNOWN)
    async with keeping(tmp_path, host, SystemClock()) as (keeper, _, _):
        words: list[str] = []
        waiting = asyncio.create_task(_granted(keeper, Holder(), words))
        await until(lambda: words == [NO_SNAPSHOT])
        host.source, host.devices = Source.NVML, SeenHost(8 * GIB).devices
        assert leased_bytes(await waiting) == GIB


async def test_lease_released_during_a_registry_outage_is_released_after_it(tmp_path: Path) -> None:
    async with keeping(tmp_path, SeenHost(8 * GIB), SystemClock()) as (keeper, leases, session):
        grant = await _granted(keeper, Holder())
        session[0] = ""
        keeper.release(grant)
        keeper.release(grant)
        await asyncio.sleep(0.05)
        assert leases.released == []
        session[0] = "session-1"
        await until(lambda: len(leases.released) == 1)
        assert leases.released[0].fencing_number == grant.fencing_number


async def test_stop_reports_the_last_releases(tmp_path: Path) -> None:
    async with keeping(tmp_path, SeenHost(8 * GIB), SystemClock()) as (keeper, leases, _):
        grant = await _granted(keeper, Holder())
        keeper.release(grant)
        leases.watched = [ENGINE]
        await keeper.stop()
        assert [release.lease_id for release in leases.released] == [grant.lease_id]
        last = leases.renewals[-1]
        assert [(seen.process.pid, seen.alive) for seen in last.sighting.processes] == [(4242, False)]
        assert list(last.leases) == [], "the book may end it: its processes were seen to be gone"


async def test_holder_learns_its_process_memory_and_unknown_remains_unknown(tmp_path: Path) -> None:
    host = SeenHost(8 * GIB)
    async with keeping(tmp_path, host, SystemClock()) as (keeper, leases, _):
        holder = Holder()
        await _granted(keeper, holder)
        assert holder.seen == [None], "there is no process yet"
        holder.held, host.held[ENGINE] = (ENGINE,), 3 * GIB
        keeper.note_change()
        await until(lambda: holder.seen[-1] == 3 * GIB)
        use = leases.renewals[-1].leases[0]
        assert [(process.pid, process.start_ticks) for process in use.processes] == [(4242, 99)]
        host.source = Source.UNKNOWN
        keeper.note_change()
        await until(lambda: holder.seen[-1] is None)


async def test_memory_of_a_load_was_taken_from_a_reading_before_its_end(tmp_path: Path) -> None:
    host = SeenHost(8 * GIB)
    async with keeping(tmp_path, host, SystemClock()) as (keeper, _, _):
        holder = Holder()
        await _granted(keeper, holder)
        holder.held, host.held[ENGINE], host.old[ENGINE] = (ENGINE,), 3 * GIB, GIB
        keeper.note_change()
        await until(lambda: holder.seen[-1])
        assert holder.seen[-1] == 3 * GIB


async def test_memory_of_a_load_that_ends_while_a_renewal_is_answered_is_read_again(tmp_path: Path) -> None:
    """The memory during the load was learned, so the next one got too little."""
    host = SeenHost(8 * GIB)
    async with keeping(tmp_path, host, SystemClock()) as (keeper, leases, _):
        holder = Holder()
        await _granted(keeper, holder)

        def end_load() -> None:
            leases.on_renewal = lambda: None
            host.held[ENGINE] = 3 * GIB
            keeper.note_change()

        holder.held, host.held[ENGINE] = (ENGINE,), GIB
        leases.on_renewal = end_load
        keeper.note_change()
        await until(lambda: holder.seen[-1])
        assert holder.seen[-1] == 3 * GIB


class SlowHost(SeenHost):
    """An observer whose looks at processes wait until the test ends them."""

    def __init__(self, *device_bytes: int) -> None:
        super().__init__(*device_bytes)
        self.is_slow = True
        self.under_way: list[asyncio.Event] = []

    @override
    async def look(self, watched: Collection[ProcessId] = (), *, fresh: bool = False) -> HostSnapshot:
        if watched and self.is_slow:
            self.under_way.append(asyncio.Event())
            await self.under_way[-1].wait()
        return await super().look(watched, fresh=fresh)

    def end(self) -> None:
        self.is_slow = False
        for each in self.under_way:
            each.set()


async def test_change_is_read_although_a_load_that_began_to_read_it_was_cancelled(tmp_path: Path) -> None:
    host, clock, holder = SlowHost(8 * GIB), FakeClock(), Holder()
    async with keeping(tmp_path, host, clock) as (keeper, _, _), AsyncExitStack() as at_end:
        at_end.callback(host.end)
        await clock.wait_for_sleepers(1)
        await _granted(keeper, holder)
        holder.held, host.held[ENGINE], host.old[ENGINE] = (ENGINE,), 3 * GIB, GIB
        first = asyncio.create_task(_granted(keeper, Holder()))
        await until(lambda: len(host.under_way) == 1)
        second = asyncio.create_task(_granted(keeper, Holder()))
        await until(lambda: keeper.held_bytes == 3 * GIB)
        keeper.note_change()
        host.under_way[0].set()
        await first
        await until(lambda: len(host.under_way) == 2)
        second.cancel()
        await until(lambda: len(host.under_way) == 3)
        seen = len(holder.seen)
        host.end()
        await until(lambda: len(holder.seen) > seen)
        assert holder.seen[seen] == 3 * GIB


async def test_processes_the_registry_watches_are_in_the_next_snapshot(tmp_path: Path) -> None:
    host = SeenHost(8 * GIB)
    async with keeping(tmp_path, host, SystemClock()) as (keeper, leases, _):
        leases.watched = [ENGINE]
        keeper.note_change()
        await until(lambda: leases.renewals)
        keeper.note_change()
        await until(lambda: leases.renewals[-1].sighting.processes)
        seen = leases.renewals[-1].sighting.processes[0]
        assert (seen.process.pid, seen.alive) == (4242, False)


async def test_concurrent_waits_at_the_registry_are_limited(tmp_path: Path) -> None:
    async with keeping(tmp_path, SeenHost(8 * GIB), SystemClock()) as (keeper, leases, _):
        leases.go.clear()
        words: list[str] = []
        waiting = [asyncio.create_task(_granted(keeper, Holder(), words)) for _ in range(MAX_CONCURRENT_REQUESTS + 3)]
        await until(lambda: len(leases.asked) == MAX_CONCURRENT_REQUESTS)
        await until(lambda: words.count(OWN_QUEUE) == 3)
        assert len(leases.asked) == MAX_CONCURRENT_REQUESTS
        leases.go.set()
        assert len({grant.lease_id for grant in await asyncio.gather(*waiting)}) == MAX_CONCURRENT_REQUESTS + 3


@pytest.mark.parametrize(("source", "seconds"), [(Source.NVML, LOOK_FOR_DEVICES_SECONDS), (Source.UNKNOWN, 5.0)])
async def test_host_without_devices_is_rarely_polled(source: Source, seconds: float, tmp_path: Path) -> None:
    host, clock = SeenHost(source=source), FakeClock()
    async with keeping(tmp_path, host, clock) as (_, leases, _):
        for looks in range(1, 4):
            await clock.wait_for_sleepers(1)
            assert len(host.asked_about) == looks
            await clock.advance(seconds - 0.5)
            assert len(host.asked_about) == looks
            await clock.advance(0.5)
        assert leases.calls == 0


async def test_lease_on_devices_that_appeared_later_is_renewed(tmp_path: Path) -> None:
    host = SeenHost()
    async with keeping(tmp_path, host, SystemClock()) as (keeper, leases, _):
        await until(lambda: host.asked_about)
        host.devices = SeenHost(8 * GIB).devices
        await _granted(keeper, Holder())
        await until(lambda: len(leases.renewals) > 1)


async def test_retried_request_sends_a_fresh_snapshot(tmp_path: Path) -> None:
    host = SeenHost(8 * GIB)
    async with keeping(tmp_path, host, SystemClock()) as (keeper, leases, _):
        await until(lambda: leases.renewals)
        words: list[str] = []
        leases.failures = [AWAY_NOW]
        asking = asyncio.create_task(_granted(keeper, Holder(), words))
        await until(lambda: words == [f"waiting for memory: {AWAY_NOW.message}"])
        host.devices = (replace(host.devices[0], used_bytes=5 * GIB),)
        await asking
        assert [request.sighting.devices[0].used_bytes for request in leases.asked] == [0, 5 * GIB]


async def test_load_that_waited_for_others_of_its_runner_sends_a_fresh_snapshot(tmp_path: Path) -> None:
    host = SeenHost(8 * GIB)
    async with keeping(tmp_path, host, SystemClock()) as (keeper, leases, _):
        leases.go.clear()
        words: list[str] = []
        waiting = [asyncio.create_task(_granted(keeper, Holder(), words)) for _ in range(MAX_CONCURRENT_REQUESTS + 1)]
        await until(lambda: len(leases.asked) == MAX_CONCURRENT_REQUESTS and OWN_QUEUE in words)
        host.devices = (replace(host.devices[0], used_bytes=5 * GIB),)
        leases.go.set()
        await asyncio.gather(*waiting)
        assert leases.asked[-1].sighting.devices[0].used_bytes == 5 * GIB


async def test_memory_wait_leaves_no_call_for_the_garbage_collector(tmp_path: Path) -> None:
    async with keeping(tmp_path, SeenHost(8 * GIB), SystemClock()) as (keeper, leases, _):
        gc.collect(0)
        gc.disable()
        try:
            for _ in range(10):
                leases.go.clear()
                asyncio.get_running_loop().call_later(0.01, leases.go.set)
                keeper.release(await _granted(keeper, Holder()))
            # All that was made since, and is left: nothing has moved on to an older generation.
            calls = [one for one in gc.get_objects(generation=0) if isinstance(one, UnaryStreamCall)]
        finally:
            gc.enable()
    assert len(calls) <= 1, "the last one may not be quite over"
