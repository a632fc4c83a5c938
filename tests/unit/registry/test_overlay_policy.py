"""What a model and an agent look like, given what was declared, what is published and who lives."""

from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType

import pytest
from kit.messages import changed

from registry_svc.mesh.overlay import (
    Publisher,
    combined,
    is_unchanged,
    may_serve,
    model_status,
    public_agent,
    public_model,
    virtual_agent,
    virtual_model,
)
from registry_svc.mesh.policy.declarations import MAX_LISTED_NAMES, decide_outcome, in_use
from registry_svc.mesh.records import Held
from registry_svc.mesh.states import Outcome, Status
from weft.api.registry.v1 import agent_pb2, model_pb2, route_pb2, runner_pb2, wake_pb2
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.time.timestamps import stamp_of

NOW = stamp_of(datetime(2026, 1, 1, tzinfo=UTC))
PLAIN = model_pb2.ModelManifest(name="m1", operations=[model_pb2.MODEL_OPERATION_CHAT])
PACKET = wake_pb2.WakeOnLanAction(mac_address="02:00:00:00:00:01")
WAKEABLE = changed(PLAIN, wake=wake_pb2.Wake(by_mesh=wake_pb2.WakeRecipe(wake_on_lan=PACKET)))
BY_RUNNER = changed(PLAIN, wake=wake_pb2.Wake(by_runner=True))
DECLARED = model_pb2.Model(manifest=PLAIN, kind=model_pb2.Model.KIND_PUBLIC, declared_runner="r1", create_time=NOW)
PUBLISHED = model_pb2.Model(manifest=PLAIN, kind=model_pb2.Model.KIND_VIRTUAL, runner="r1", create_time=NOW)


def publisher(
    *,
    active: bool = True,
    sleeping: frozenset[str] = frozenset(),
    failed: frozenset[str] = frozenset(),
    runtimes: Mapping[str, str] = MappingProxyType({}),
) -> Publisher:
    return Publisher(
        profile=runner_pb2.Runner(name="r1", runtime="llama_server"),
        ticket_key=b"",
        capability=Held(runner_pb2.Capability()),
        active=active,
        sleeping=sleeping,
        failed=failed,
        runtimes=runtimes,
        last_heartbeat_time=NOW,
        inactive_time=None if active else NOW,
    )


M1 = frozenset({"m1"})


@pytest.mark.parametrize(
    ("manifest", "runner", "status"),
    [
        (PLAIN, publisher(), Status.ACTIVE),
        (PLAIN, publisher(sleeping=M1), Status.HIBERNATING),
        (PLAIN, publisher(failed=M1), Status.FAILED),
        (PLAIN, publisher(active=False, failed=M1), Status.INACTIVE),
        (WAKEABLE, publisher(failed=M1), Status.FAILED),
        (PLAIN, publisher(active=False), Status.INACTIVE),
        (PLAIN, publisher(active=False, sleeping=M1), Status.INACTIVE),
        (PLAIN, None, Status.INACTIVE),
        (BY_RUNNER, publisher(active=False, sleeping=M1), Status.INACTIVE),
        (BY_RUNNER, publisher(sleeping=M1), Status.HIBERNATING),
        (WAKEABLE, publisher(), Status.ACTIVE),
        (WAKEABLE, publisher(active=False), Status.HIBERNATING),
        (WAKEABLE, None, Status.HIBERNATING),
    ],
)
def test_model_status_follows_declaration_and_publication(
    manifest: model_pb2.ModelManifest, runner: Publisher | None, status: Status
) -> None:
    assert model_status(manifest, runner) is status


def test_declared_values_take_precedence_over_published_ones() -> None:
    declared = changed(WAKEABLE, pool_name="p1", context_tokens=100)
    published = changed(PLAIN, pool_name="p2", context_tokens=200, digest="sha256:" + "0" * 64, remote=True)
    assert combined(declared, published) == changed(declared, digest=published.digest, remote=True)
    assert combined(declared, None) == declared
    assert combined(changed(PLAIN, remote=True), PLAIN).remote


def test_declared_price_takes_precedence_over_the_list_price_of_the_runner() -> None:
    listed, own = (model_pb2.ModelPrice(completion_dollars=dollars) for dollars in (10.0, 7.0))
    published = changed(PLAIN, price=listed)
    assert combined(PLAIN, published).price == listed
    assert combined(changed(PLAIN, price=own), published).price == own


def test_pin_allows_only_one_runner_to_serve() -> None:
    assert may_serve(DECLARED, "r1")
    assert not may_serve(DECLARED, "r2")
    assert may_serve(changed(DECLARED, declared_runner=""), "r2")
    assert may_serve(None, "r2")


def test_views_show_who_declared_and_who_serves() -> None:
    public = public_model(DECLARED, Held(PUBLISHED), publisher())
    assert (public.kind, public.runner, public.declared_runner) == (model_pb2.Model.KIND_PUBLIC, "r1", "r1")
    lonely = public_model(DECLARED, None, None)
    assert lonely.runner == ""
    assert (lonely.HasField("last_heartbeat_time"), lonely.HasField("inactive_time")) == (False, False)
    virtual = virtual_model(Held(PUBLISHED), publisher(active=False))
    assert (virtual.kind, virtual.runner, virtual.inactive_time) == (model_pb2.Model.KIND_VIRTUAL, "r1", NOW)


def test_model_type_is_the_runtime_that_serves_it() -> None:
    assert virtual_model(Held(PUBLISHED), publisher()).type == "llama_server"
    attached = publisher(runtimes={"m1": "openai_http"})
    assert virtual_model(Held(PUBLISHED), attached).type == "openai_http"
    assert public_model(DECLARED, Held(PUBLISHED), attached).type == "openai_http"


@pytest.mark.parametrize("target", list(Status))
def test_agent_status_follows_its_target_and_for_published_agents_also_the_runner(target: Status) -> None:
    agent = agent_pb2.Agent(manifest=agent_pb2.AgentManifest(name="a1", model="m1"), runner="r1", create_time=NOW)
    assert Status(public_agent(agent, target).status) is target
    assert Status(virtual_agent(agent, publisher(), target).status) is target
    assert Status(virtual_agent(agent, publisher(active=False), target).status) is Status.INACTIVE


def decide(given: model_pb2.ModelManifest, runner: str = "", *, live: bool = True, adopt: bool = False) -> Outcome:
    declaration = model_pb2.ModelDeclaration(manifest=given, runner=runner)
    view = virtual_model(Held(PUBLISHED), publisher(active=live))
    return decide_outcome(
        ResourceKind.MODEL,
        given.name,
        is_declared=False,
        same=is_unchanged(declaration, view=view, declared=None, publication=PUBLISHED),
        publisher=PUBLISHED.runner,
        publisher_live=live,
        adopt=adopt,
    )


def test_outcome_of_a_declaration_over_a_published_row() -> None:
    assert decide(PLAIN) is decide(PLAIN, "r1") is decide(PLAIN, live=False) is Outcome.UNCHANGED
    assert decide(WAKEABLE, live=False) is decide(PLAIN, "r2", live=False) is Outcome.CONFIGURED
    assert decide(PLAIN, adopt=True) is decide(WAKEABLE, "r2", adopt=True) is Outcome.CONFIGURED
    for given, runner in ((WAKEABLE, ""), (PLAIN, "r2")):
        with pytest.raises(WeftError, match="--adopt"):
            decide(given, runner)


def test_blocking_agents_are_listed_up_to_a_limit() -> None:
    error = in_use(ResourceKind.MODEL, "m1", {ResourceKind.AGENT: {f"a{number:02}" for number in range(25)}})
    assert len(error.metadata["agents"].split(",")) == MAX_LISTED_NAMES
    assert "and 15 more" in error.message


def test_blocking_routes_are_listed_up_to_a_limit_beside_the_agents() -> None:
    routes = {f"q{number:02}" for number in range(11)}
    error = in_use(ResourceKind.MODEL, "m1", {ResourceKind.AGENT: {"a1"}, ResourceKind.ROUTE: routes})
    assert "by agents: a1; by routes: q00, " in error.message
    assert "q09 and 1 more; delete" in error.message
    assert error.metadata["agents"] == "a1"
    assert len(error.metadata["routes"].split(",")) == MAX_LISTED_NAMES


def test_declared_skills_take_precedence_and_published_ones_are_used_without_any() -> None:
    text, image = model_pb2.MODEL_SKILL_TEXT, model_pb2.MODEL_SKILL_IMAGE
    published = changed(PLAIN, skills=[text, image])
    assert combined(PLAIN, published).skills == published.skills
    assert combined(changed(PLAIN, skills=[text]), published).skills == [text]
    assert combined(changed(PLAIN, skills=[text]), None).skills == [text]


def test_outcome_of_a_declared_route() -> None:
    route = route_pb2.RouteManifest(name="q1", candidates=["m1", "m2"])

    def outcome(earlier: route_pb2.RouteManifest | None) -> Outcome:
        return decide_outcome(
            ResourceKind.ROUTE,
            "q1",
            is_declared=earlier is not None,
            same=earlier == route,
            publisher="",
            publisher_live=False,
            adopt=False,
        )

    assert outcome(None) is Outcome.CREATED
    assert outcome(changed(route)) is Outcome.UNCHANGED
    # The order of a ladder is what it is about.
    assert outcome(changed(route, candidates=["m2", "m1"])) is Outcome.CONFIGURED
