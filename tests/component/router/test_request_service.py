"""RequestService over a socket."""

from pathlib import Path

import pytest
from kit.refusals import refused
from request_reads import RecordingRouter, remote

from router_svc.request_log import RequestLogLimits
from weft.api.router.v1 import request_service_pb2 as pb
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
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
