"""Lists, page by page."""

from registry_harness import RunningRegistry, SomeRunner

from weft.api.registry.v1 import registry_service_pb2

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
