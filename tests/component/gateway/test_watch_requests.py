"""Requests and figures in `/api/v1/watch`: a tenant's own alone, and no more than a reader has room for."""

from collections.abc import AsyncGenerator, Iterator
from itertools import islice

from gateway_script import serving
from kit.keys import Keys, bearer
from test_gateway_requests import ScriptedRequests, ended, figures_of, waiting
from watch_script import QUICK, WATCH, brief, watching

from gateway.watch.source import Change, ChangeType, WatchCaller
from gateway.watch.sources import figures_of_mesh, requests_of_tenant
from weft.api.router.v1 import request_pb2 as pb
from weft.kernel.access.principal import (
    LOCAL,
)

CALLER = WatchCaller(principal=LOCAL, tenant="default")


KEYS = Keys(
    {"ann000000000": ("inference:view",), "bob000000000": ("inference:view",), "ops000000000": ("telemetry:view",)},
    tenants={"ann000000000": "default", "bob000000000": "b", "ops000000000": "ops"},
)


def end_of(request_id: str, tenant: str = "default") -> pb.RequestRecord:
    record = ended()
    record.request_id, record.tenant = request_id, tenant
    return record


async def test_request_is_sent_in_list_format_and_again_on_change() -> None:
    requests = ScriptedRequests()
    async with (
        serving(config=QUICK, requests=requests, watched=[requests_of_tenant(requests)]) as gateway,
        watching(gateway, "request") as stream,
    ):
        found = await stream.snapshot("request")
        assert [brief(one) for one in found] == [
            ("request", "put", "req-1"),
            ("request", "put", "req-2"),
            ("request", "synced"),
        ]
        listed = (await gateway.request("GET", "/v1/requests")).json
        assert [one["object"] for one in found[:-1]] == listed["items"]
        requests.changed.put_nowait(end_of("req-1"))
        change = await stream.next()
        assert (brief(change), change["object"]["state"]) == (("request", "put", "req-1"), "ended")
    assert requests.asked[0] == ("default", 1_000)


async def test_requests_of_other_tenants_are_never_sent() -> None:
    requests = ScriptedRequests()
    async with serving(config=QUICK, requests=requests, keys=KEYS, watched=[requests_of_tenant(requests)]) as gateway:
        other = {**bearer("bob000000000"), "X-Tenant-Id": "default"}
        assert (await gateway.request("GET", f"{WATCH}?kinds=request", headers=other)).status == 403
        async with watching(gateway, "request", bearer("bob000000000")) as stream:
            found = await stream.snapshot("request")
            requests.changed.put_nowait(end_of("req-1"))
            requests.changed.put_nowait(end_of("req-9", "b"))
            found.append(await stream.next())
        assert {one["object"]["tenant"] for one in found if "object" in one} == {"b"}


async def test_each_key_watches_requests_of_its_own_tenant() -> None:
    requests = ScriptedRequests()
    async with (
        serving(config=QUICK, requests=requests, keys=KEYS, watched=[requests_of_tenant(requests)]) as gateway,
        watching(gateway, "request", bearer("ann000000000")) as of_ann,
        watching(gateway, "request", bearer("bob000000000")) as of_bob,
    ):
        assert [one.get("name") for one in await of_ann.snapshot("request")] == ["req-1", "req-2", None]
        assert [one.get("name") for one in await of_bob.snapshot("request")] == ["req-3", None]


async def test_requests_and_metrics_need_the_scopes_of_their_lists() -> None:
    requests = ScriptedRequests()
    sources = [requests_of_tenant(requests), figures_of_mesh(requests)]
    async with serving(config=QUICK, requests=requests, keys=KEYS, watched=sources) as gateway:
        for key, kind, path in (
            ("ann000000000", "figures", "/v1/admin/figures"),
            ("ops000000000", "request", "/v1/requests"),
        ):
            refused = await gateway.request("GET", f"{WATCH}?kinds={kind}", headers=bearer(key))
            assert refused.status == 403
            assert kind in refused.error["message"]
            assert (await gateway.request("GET", path, headers=bearer(key))).status == 403
        async with watching(gateway, "figures", bearer("ops000000000")) as stream:
            assert [brief(one)[1] for one in await stream.snapshot("figures")] == ["put", "synced"]


async def test_metrics_start_with_the_last_hour_and_continue_step_by_step() -> None:
    requests = ScriptedRequests()
    async with (
        serving(config=QUICK, requests=requests, watched=[figures_of_mesh(requests)]) as gateway,
        watching(gateway, "figures") as stream,
    ):
        first, _ = await stream.snapshot("figures")
        assert (first["name"], first["object"]["stepCount"]) == ("2026-11-20T12:00:00Z", 3)
        requests.changed.put_nowait(figures_of(1, "2026-11-20T12:00:30Z"))
        step = await stream.next()
        assert (step["name"], step["object"]["stepCount"]) == ("2026-11-20T12:00:30Z", 1)


async def taken(changes: AsyncGenerator[Change], count: int) -> Iterator[tuple[str, str]]:
    found = [(change.type.value, change.name) for change in [await anext(changes) for _ in range(count)]]
    await changes.aclose()
    return islice(found, count)


async def test_oldest_ended_request_is_deleted_when_the_reader_limit_is_reached() -> None:
    # As a router sends them: those under way, then the last ended one first.
    requests = ScriptedRequests(records=[waiting(), end_of("old-2"), end_of("old-1")])
    for record in (end_of("new-1"), end_of("new-2"), waiting("old-2")):
        requests.changed.put_nowait(record)
    changes = requests_of_tenant(requests, max_ended=2).changes(CALLER)
    assert list(await taken(changes, 9)) == [
        ("put", "req-1"),
        ("put", "old-2"),
        ("put", "old-1"),
        ("synced", ""),
        ("put", "new-1"),
        ("delete", "old-1"),
        ("put", "new-2"),
        ("delete", "old-2"),
        ("put", "old-2"),
    ]


async def test_metrics_are_reset_after_an_hour_of_steps() -> None:
    requests = ScriptedRequests()
    for second in (30, 40):
        requests.changed.put_nowait(figures_of(1, f"2026-11-20T12:00:{second}Z"))
    changes = figures_of_mesh(requests, renewed_after=2).changes(CALLER)
    assert [kind for kind, _ in await taken(changes, 6)] == [
        ChangeType.PUT,
        ChangeType.SYNCED,
        ChangeType.PUT,
        ChangeType.RESET,
        ChangeType.PUT,
        ChangeType.SYNCED,
    ]
