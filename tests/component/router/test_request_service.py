"""RequestService over a socket."""

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path

import pytest
from kit.refusals import refused
from request_reads import RecordingRouter, remote

from router_svc.policy.change_buffer import WatchLimits
from router_svc.request_log import RequestLogLimits
from weft.api.router.v1 import request_pb2
from weft.api.router.v1 import request_service_pb2 as pb
from weft.durable.requests import RequestClient
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import SystemClock
from weft_testing.fake_clock import FakeClock


async def test_remote_reads_equal_local_reads(tmp_path: Path) -> None:
    router = RecordingRouter(FakeClock())
    for key, tenant in ((1, "a"), (2, "b"), (3, "a")):
        router.arrive(key, tenant)
        router.wait(key, key)
    async with remote(router.servicer, tmp_path) as requests:
        assert await requests.request("r-2") == await router.local.request("r-2")
        assert (await requests.request("r-2")).queued.eta.ToMilliseconds() == 2500
        assert await requests.clients() == await router.local.clients()
        for tenant, limit, ids, total in (("", 2, ["r-1", "r-2"], 3), ("a", 5, ["r-1", "r-3"], 2), ("c", 5, [], 0)):
            for source in (requests, router.local):
                found = await source.requests(limit, tenant)
                assert ([one.request_id for one in found.requests], found.total_count) == (ids, total)
                assert all(not one.decisions for one in found.requests)


async def test_ended_requests_are_listed_by_outcome_newest_first(tmp_path: Path) -> None:
    clock = FakeClock()
    router = RecordingRouter(clock)
    ends = {
        1: Reason.UNSPECIFIED,
        2: Reason.STALL_TIMEOUT,
        3: Reason.CANCELLED,
        4: Reason.CANCELLED,
        5: Reason.UNSPECIFIED,
    }
    for key, reason in ends.items():
        router.arrive(key, "b" if key == 5 else "a")
        router.end(key, reason)
    router.arrive(6)
    wanted = [
        (pb.REQUEST_SELECTION_ENDED, "", ["r-5", "r-4", "r-3", "r-2", "r-1"]),
        (pb.REQUEST_SELECTION_COMPLETED, "", ["r-5", "r-1"]),
        (pb.REQUEST_SELECTION_COMPLETED, "a", ["r-1"]),
        (pb.REQUEST_SELECTION_FAILED, "", ["r-2"]),
        (pb.REQUEST_SELECTION_CANCELLED, "", ["r-4", "r-3"]),
        (pb.REQUEST_SELECTION_UNSPECIFIED, "", ["r-6"]),
    ]
    async with remote(router.servicer, tmp_path) as requests:
        for selection, tenant, ids in wanted:
            for source in (requests, router.local):
                found = await source.requests(100, tenant, selection)
                assert ([one.request_id for one in found.requests], found.total_count) == (ids, len(ids))
        few = await requests.requests(2, "", pb.REQUEST_SELECTION_ENDED)
        assert ([one.request_id for one in few.requests], few.total_count) == (["r-5", "r-4"], 5)
        await clock.advance(RequestLogLimits().keep_seconds + 1)
        assert (await requests.requests(100, "", pb.REQUEST_SELECTION_ENDED)).total_count == 0, "they are forgotten"
        with refused(field="selection"):
            await requests.requests(100, "", 99)  # type: ignore[arg-type]  # of a later release


@pytest.mark.parametrize(("request_id", "tenant"), [("r-9", ""), ("r-1", "b")])
async def test_unknown_and_foreign_requests_return_the_same_not_found_message(
    tmp_path: Path, request_id: str, tenant: str
) -> None:
    router = RecordingRouter(FakeClock())
    router.arrive(1)
    async with remote(router.servicer, tmp_path) as requests:
        for source in (requests, router.local):
            with pytest.raises(WeftError, match=f"no request {request_id} is known") as caught:
                await source.request(request_id, tenant)
            assert caught.value.reason is Reason.NOT_FOUND


async def test_invalid_id_or_limit_is_rejected_by_name(tmp_path: Path) -> None:
    async with remote(RecordingRouter(FakeClock()).servicer, tmp_path) as requests:
        with refused(field="request_id"):
            await requests.request("two words")
        with refused(field="tenant"):
            await requests.request("r-1", "no tenant")
        with refused(field="limit"):
            await requests.requests(-1)


QUICK = WatchLimits(interval_seconds=0.001, figures_interval_seconds=0.001, max_watches=2)


async def snapshot(watch: AsyncGenerator[pb.WatchRequestsResponse]) -> list[str]:
    """Returns the ids of the requests that a watch begins with."""
    found: list[str] = []
    async for response in watch:
        found += [one.request_id for one in response.requests]
        if response.synced:
            return found
    raise AssertionError("the watch ended before its snapshot was whole")


async def until(watch: AsyncGenerator[pb.WatchRequestsResponse], state: int) -> request_pb2.RequestRecord:
    async for response in watch:
        for one in response.requests:
            if one.state == state:
                return one
    raise AssertionError("the watch ended")


async def test_watch_starts_with_existing_requests_and_continues_with_changes(tmp_path: Path) -> None:
    router = RecordingRouter(SystemClock(), QUICK)
    for key in (1, 2, 3):
        router.arrive(key)
    router.end(2)
    async with remote(router.servicer, tmp_path) as requests:
        sources: tuple[RequestClient, ...] = (requests, router.local)
        for number, source in enumerate(sources):
            async with aclosing(source.watch("", 10)) as watch:
                assert await snapshot(watch) == ["r-1", "r-3", *(["r-10"] if number else []), "r-2"]
                router.arrive(10 + number, "b")
                router.wait(10 + number, 4)
                queued = await until(watch, request_pb2.RequestRecord.STATE_QUEUED)
                assert (queued.request_id, queued.tenant) == (f"r-{10 + number}", "b")
                router.end(10 + number)
                ended = await until(watch, request_pb2.RequestRecord.STATE_ENDED)
                assert (ended.request_id, ended.HasField("end_time")) == (f"r-{10 + number}", True)
                assert not ended.decisions
        async with aclosing(requests.watch("", 1)) as watch:
            assert await snapshot(watch) == ["r-1", "r-3", "r-11"], "of those that ended only the last"
        async with aclosing(requests.watch("a")) as watch:
            assert await snapshot(watch) == ["r-1", "r-3"]


async def test_watch_over_the_limit_is_rejected_until_another_leaves(tmp_path: Path) -> None:
    router = RecordingRouter(SystemClock(), QUICK)
    async with remote(router.servicer, tmp_path) as requests:
        async with aclosing(requests.watch()) as first, aclosing(requests.watch_figures()) as second:
            await anext(first)
            await anext(second)
            with pytest.raises(WeftError, match="more than 2 watches") as caught:
                await anext(requests.watch())
            assert caught.value.reason is Reason.RATE_LIMIT_EXCEEDED
        # The router hears of their end a moment later.
        while not await has_room(requests):
            pass


async def has_room(requests: RequestClient) -> bool:
    with suppress(WeftError):
        async with aclosing(requests.watch()) as watch:
            return (await anext(watch)).synced
    return False


async def test_negative_ended_request_count_is_rejected(tmp_path: Path) -> None:
    async with remote(RecordingRouter(SystemClock(), QUICK).servicer, tmp_path) as requests:
        with refused(field="ended_limit"):
            await anext(requests.watch("", -1))


@pytest.mark.slow("runs whole services")
async def test_metrics_are_read_and_watched_over_a_socket(tmp_path: Path) -> None:
    router = RecordingRouter(SystemClock(), QUICK)
    router.figures.tally.note_load(3, 1, router.clock.monotonic())
    async with remote(router.servicer, tmp_path) as requests:
        async with aclosing(requests.watch_figures()) as watch:
            first = await anext(watch)
            assert list(first.waiting) in ([], [3]), "the step goes on, or has just ended"
            later = await anext(watch)
            assert 3 in later.waiting or 3 in first.waiting
        assert 3 in (await requests.figures()).waiting
