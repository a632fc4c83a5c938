"""Tier, labels and owner of models, agents and routes: published, declared, kept and selected by."""

import pytest
from kit.refusals import refused
from kit.resources import declared
from registry_harness import RunningRegistry, SomeRunner, an_agent, declare, manifest

from weft.api.registry.v1 import agent_pb2, model_pb2
from weft.api.registry.v1.registry_service_pb2 import ListResourcesRequest
from weft.api.registry.v1.route_pb2 import RouteManifest
from weft.api.registry.v1.tags_pb2 import Tags
from weft.kernel.errors.reasons import Reason


def tagged(name: str, **tags: object) -> model_pb2.ModelManifest:
    made = manifest(name)
    made.tags.CopyFrom(Tags(**tags))  # type: ignore[arg-type]
    return made


def tagged_agent(name: str, model: str, **tags: object) -> agent_pb2.AgentManifest:
    made = an_agent(name, model)
    made.tags.CopyFrom(Tags(**tags))  # type: ignore[arg-type]
    return made


async def test_declared_tags_override_published_ones_and_redeclaring_changes_nothing(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=(tagged("m1", tier="fast", labels={"team": "a"}, owner="ann"),)).open()
    await mesh.apply(declare(tagged("m1", tier="heavy")), adopt=True)
    shown = await mesh.model("m1")
    assert shown.manifest.tags == Tags(tier="heavy", labels={"team": "a"}, owner="ann")
    assert await mesh.apply(declare(shown.manifest)) == ["model m1 unchanged"]
    assert await mesh.apply(declare(tagged("m1", tier="fast"))) == ["model m1 configured"]


@pytest.mark.parametrize(
    ("labels", "models", "agents"),
    [
        ("", ["m1", "m2", "m3"], ["a1", "a2"]),
        ("tier=fast", ["m1", "m3"], ["a1"]),
    ],
)
async def test_lists_filter_by_selector(
    mesh: RunningRegistry, labels: str, models: list[str], agents: list[str]
) -> None:
    await mesh.apply(
        declare(tagged("m1", tier="fast", labels={"team": "a"})),
        declare("m2"),
        declare(tagged("m3", tier="fast", labels={"team": "b"})),
        declared(agent=tagged_agent("a1", "m1", tier="fast")),
        declared(agent=an_agent("a2", "m1")),
        declared(route=RouteManifest(name="r1", candidates=["m1"], tags=Tags(tier="fast"))),
        declared(route=RouteManifest(name="r2", candidates=["m1"])),
    )
    found, token = [], ""
    while True:
        page = await mesh.registry.ListResources(
            ListResourcesRequest(kind="model", page_size=1, page_token=token, labels=labels)
        )
        found += [each.name for each in page.resources]
        token = page.next_page_token
        if not token:
            break
    assert found == models
    listed = await mesh.listed("agent", labels=labels)
    assert [agent.manifest.name for agent in listed] == agents
    listed = await mesh.listed("route", labels=labels)
    assert [route.manifest.name for route in listed] == [f"r{agent[1:]}" for agent in agents]


async def test_invalid_tags_are_rejected_by_field(mesh: RunningRegistry) -> None:
    invalid = tagged("m1", labels={"tier": "fast"})
    with refused(field="declarations[0].model.manifest.tags.labels[tier]"):
        await mesh.apply(declare(invalid))
    assert "tags.labels[tier]" in (await SomeRunner(mesh, models=(invalid,)).open()).left_out[0]
    with refused(Reason.INVALID_ARGUMENT):
        await mesh.registry.ListResources(ListResourcesRequest(kind="model", labels="a=b c"))
