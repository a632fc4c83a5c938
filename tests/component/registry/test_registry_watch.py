"""What watchers hear, and what they do not."""

import asyncio
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kit.refusals import refused
from registry_harness import READ_LIMIT_SECONDS, RunningRegistry, SomeRunner, ready, running_registry

from weft.api.registry.v1 import registry_service_pb2, runner_pb2
from weft.kernel.errors.reasons import Reason


async def test_first_response_is_a_snapshot_even_of_an_empty_mesh(mesh: RunningRegistry) -> None:
    watch = await mesh.watch()
    assert watch.snapshot.WhichOneof("kind") == "snapshot"
    assert watch.snapshot.revision > 0


async def test_watcher_receives_every_status_change(mesh: RunningRegistry) -> None:
    watch = await mesh.watch()
    runner = await SomeRunner(mesh).open()
    assert await watch.read_changes(2) == ["runner r1 active", "model m1 active"]
    await mesh.advance(90.0)
    assert await watch.read_changes(2) == ["runner r1 inactive", "model m1 inactive"]
    await runner.beat()
    assert await watch.read_changes(2) == ["runner r1 active", "model m1 active"]


async def test_unchanged_reports_are_not_published(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    await runner.beat(ready(slots_used=1))
    watch = await mesh.watch()
    for _ in range(5):
        await mesh.advance(5.0)
        await runner.beat(ready(slots_used=1))
    await runner.beat(ready(slots_used=2))
    response = await watch.read()
    assert response.revision == watch.snapshot.revision + 1
    assert response.change.runner.runner.capability.instances[0].slots_used == 2


async def test_ticket_keys_are_sent_only_to_watchers_that_request_them(mesh: RunningRegistry) -> None:
    first = await SomeRunner(mesh).open()
    router, gateway = await mesh.watch(include_ticket_keys=True), await mesh.watch()
    assert router.snapshot.snapshot.runners[0].ticket_key == first.ticket_key
    assert gateway.snapshot.snapshot.runners[0].ticket_key == b""
    second = await SomeRunner(mesh, incarnation="life-2", session_id=first.session_id).open()
    assert (await router.read()).change.runner.ticket_key == second.ticket_key
    told = await gateway.read()
    assert told.change.runner.ticket_key == b""
    assert second.ticket_key not in told.SerializeToString()


@pytest.mark.slow("steps hours of a registry's life")
async def test_stalled_watcher_is_ended_and_others_continue(tmp_path: Path) -> None:
    async with running_registry(tmp_path, watch_buffer_responses=4) as mesh:
        runner = await SomeRunner(mesh, models=tuple(f"m{index}" for index in range(64))).open()
        slow, quick = await mesh.watch(), await mesh.watch()
        for number in range(1, 41):
            await runner.beat(_large_report(number))
            await quick.read()
        with refused(Reason.WATCH_LAGGED) as errors:
            for _ in range(41):
                await slow.read()
        assert errors[0].retry_after_seconds == 1.0
        await runner.beat(ready())
        assert await quick.read_changes(1) == ["runner r1 active"]
        fresh = await mesh.watch()
        assert len(fresh.snapshot.snapshot.runners) == 1


def _large_report(number: int) -> runner_pb2.Capability:
    """A quarter of a megabyte that is new every time: gRPC itself holds about 4 MB for a reader that does not read."""
    states = [ready(f"m{index}", slots_used=number, detail="x" * 4000).instances[0] for index in range(64)]
    return runner_pb2.Capability(instances=states)


async def test_stopping_registry_ends_watchers_with_shutting_down(mesh: RunningRegistry) -> None:
    watch = await mesh.watch()
    await mesh.service.stop(grace_seconds=1.0)
    with refused(Reason.SHUTTING_DOWN):
        await watch.read()
    with refused(Reason.SHUTTING_DOWN):
        await mesh.runner("r1")


async def test_disconnected_watcher_is_removed(mesh: RunningRegistry) -> None:
    watch = await mesh.watch()
    watchers = mesh.service._core.watchers
    assert len(watchers) == 1
    watch.call.cancel()
    async with asyncio.timeout(READ_LIMIT_SECONDS):
        while watchers:
            # Any answered rpc shows that the server's loop has turned.
            await mesh.registry.ListResources(registry_service_pb2.ListResourcesRequest(kind="runner"))


async def test_registry_serves_health_and_reflection(mesh: RunningRegistry) -> None:
    health = health_pb2_grpc.HealthStub(mesh.channel)
    for name in ("", "weft.api.registry.v1.RegistryService", "weft.api.registry.v1.RunnerSessionService"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(mesh.channel)
    call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    listed = {service.name for service in (await call.read()).list_services_response.service}
    assert set(mesh.service.service_names) <= listed


ListResources = registry_service_pb2.ListResourcesRequest


async def test_pages_contain_every_model_once_in_order(mesh: RunningRegistry) -> None:
    names = tuple(f"m{number:02}" for number in range(25))
    await SomeRunner(mesh, models=tuple(reversed(names))).open()
    listed: list[str] = []
    token, pages = "", 0
    while pages == 0 or token:
        response = await mesh.registry.ListResources(ListResources(kind="model", page_size=10, page_token=token))
        listed += [each.name for each in response.resources]
        token, pages = response.next_page_token, pages + 1
    assert (tuple(listed), pages) == (names, 3)


async def test_paging_survives_the_deletion_of_the_last_seen_runner(mesh: RunningRegistry) -> None:
    seen = await SomeRunner(mesh, name="a", models=()).open()
    await SomeRunner(mesh, name="b", models=()).open()
    first = await mesh.registry.ListResources(ListResources(kind="runner", page_size=1))
    await seen.close()
    await SomeRunner(mesh, name="z", incarnation="life-2", session_id=seen.session_id, models=()).open()
    second = await mesh.registry.ListResources(
        ListResources(kind="runner", page_size=1, page_token=first.next_page_token)
    )
    assert [each.name for each in second.resources] == ["b"]


async def test_reads_never_return_a_ticket_key(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    assert runner.ticket_key not in (await mesh.runner("r1")).SerializeToString()
