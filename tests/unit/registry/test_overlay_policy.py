"""What a model and an agent look like, given what was declared, what is published and who lives."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from registry_svc.mesh.domain import (
    AgentManifest,
    AgentPublication,
    DeclaredAgent,
    DeclaredModel,
    Kind,
    Manifest,
    ModelDeclaration,
    Outcome,
    Publication,
    RouteManifest,
    Status,
)
from registry_svc.mesh.policy.declarations import (
    MAX_LISTED_NAMES,
    Publisher,
    combined,
    decide_model,
    decide_route,
    in_use,
    may_serve,
    model_status,
    public_agent,
    public_model,
    virtual_agent,
    virtual_model,
)
from weft.kernel.errors import WeftError
from weft.kernel.request import Operation, Skill
from weft.wake.recipes import WakeOnLanRecipe, WakePlan

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PLAIN = Manifest(name="m1", pool_name="", operations=(Operation.CHAT,), context_tokens=0, digest="", remote=False)
WAKEABLE = replace(PLAIN, wake=WakePlan(by_runner=False, by_mesh=WakeOnLanRecipe(mac_address="02:00:00:00:00:01")))
BY_RUNNER = replace(PLAIN, wake=WakePlan(by_runner=True))


def publisher(*, active: bool = True, sleeping: frozenset[str] = frozenset()) -> Publisher:
    return Publisher(
        name="r1",
        active=active,
        sleeping=sleeping,
        last_heartbeat_at=NOW,
        inactive_since=None if active else NOW,
    )


ASLEEP = frozenset({"m1"})


@pytest.mark.parametrize(
    ("manifest", "runner", "status"),
    [
        (PLAIN, publisher(), Status.ACTIVE),
        (PLAIN, publisher(sleeping=ASLEEP), Status.HIBERNATING),
        (PLAIN, publisher(active=False), Status.INACTIVE),
        (PLAIN, publisher(active=False, sleeping=ASLEEP), Status.INACTIVE),
        (PLAIN, None, Status.INACTIVE),
        (BY_RUNNER, publisher(active=False, sleeping=ASLEEP), Status.INACTIVE),
        (BY_RUNNER, publisher(sleeping=ASLEEP), Status.HIBERNATING),
        (WAKEABLE, publisher(), Status.ACTIVE),
        (WAKEABLE, publisher(active=False), Status.HIBERNATING),
        (WAKEABLE, None, Status.HIBERNATING),
    ],
)
def test_the_status_of_a_model(manifest: Manifest, runner: Publisher | None, status: Status) -> None:
    assert model_status(manifest, runner) is status


def test_a_declaration_wins_where_it_says_something() -> None:
    declared = replace(WAKEABLE, pool_name="p1", context_tokens=100)
    published = replace(PLAIN, pool_name="p2", context_tokens=200, digest="sha256:" + "0" * 64, remote=True)
    assert combined(declared, published) == replace(declared, digest=published.digest, remote=True)
    assert combined(declared, None) == declared
    assert combined(replace(PLAIN, remote=True), PLAIN).remote


def test_a_pin_lets_one_runner_serve() -> None:
    declared = DeclaredModel(manifest=PLAIN, runner="r1", created_at=NOW)
    assert may_serve(declared, "r1")
    assert not may_serve(declared, "r2")
    assert may_serve(replace(declared, runner=""), "r2")
    assert may_serve(None, "r2")


def test_views_say_who_declared_and_who_serves() -> None:
    declared = DeclaredModel(manifest=PLAIN, runner="r1", created_at=NOW)
    public = public_model(declared, Publication(manifest=PLAIN, runner="r1", created_at=NOW), publisher())
    assert (public.public, public.runner, public.declared_runner) == (True, "r1", "r1")
    lonely = public_model(declared, None, None)
    assert (lonely.runner, lonely.last_heartbeat_at, lonely.inactive_since) == ("", None, None)
    virtual = virtual_model(Publication(manifest=PLAIN, runner="r1", created_at=NOW), publisher(active=False))
    assert (virtual.public, virtual.runner, virtual.inactive_since) == (False, "r1", NOW)


@pytest.mark.parametrize("target", list(Status))
def test_an_agent_follows_its_target_and_a_virtual_one_its_runner_too(target: Status) -> None:
    manifest = AgentManifest(
        name="a1", target="m1", targets_pool=False, description="", system_prompt="", default_params="{}"
    )
    assert public_agent(DeclaredAgent(manifest=manifest, created_at=NOW), target).status is target
    publication = AgentPublication(manifest=manifest, runner="r1", created_at=NOW)
    assert virtual_agent(publication, publisher(), target).status is target
    assert virtual_agent(publication, publisher(active=False), target).status is Status.INACTIVE


def decide(given: Manifest, runner: str = "", *, live: bool = True, adopt: bool = False) -> Outcome:
    publication = Publication(manifest=PLAIN, runner="r1", created_at=NOW)
    return decide_model(
        ModelDeclaration(manifest=given, runner=runner),
        view=virtual_model(publication, publisher(active=live)),
        declared=None,
        publication=publication,
        publisher_live=live,
        adopt=adopt,
    )


def test_what_becomes_of_a_declaration_over_a_virtual_row() -> None:
    assert decide(PLAIN) is decide(PLAIN, "r1") is decide(PLAIN, live=False) is Outcome.UNCHANGED
    assert decide(WAKEABLE, live=False) is decide(PLAIN, "r2", live=False) is Outcome.CONFIGURED
    assert decide(PLAIN, adopt=True) is decide(WAKEABLE, "r2", adopt=True) is Outcome.CONFIGURED
    for given, runner in ((WAKEABLE, ""), (PLAIN, "r2")):
        with pytest.raises(WeftError, match="--adopt"):
            decide(given, runner)


def test_many_agents_in_the_way_are_listed_in_part() -> None:
    error = in_use(Kind.MODEL, "m1", {f"a{number:02}" for number in range(25)})
    assert len(error.metadata["agents"].split(",")) == MAX_LISTED_NAMES
    assert "and 15 more" in error.message


def test_many_routes_in_the_way_are_listed_in_part_beside_the_agents() -> None:
    error = in_use(Kind.MODEL, "m1", {"a1"}, {f"q{number:02}" for number in range(11)})
    assert "by agents: a1; by routes: q00, " in error.message
    assert "q09 and 1 more; delete" in error.message
    assert error.metadata["agents"] == "a1"
    assert len(error.metadata["routes"].split(",")) == MAX_LISTED_NAMES


def test_declared_skills_win_over_published_ones_and_none_are_taken_over() -> None:
    published = replace(PLAIN, skills=(Skill.TEXT, Skill.IMAGE))
    assert combined(PLAIN, published).skills == published.skills
    assert combined(replace(PLAIN, skills=(Skill.TEXT,)), published).skills == (Skill.TEXT,)
    assert combined(replace(PLAIN, skills=(Skill.TEXT,)), None).skills == (Skill.TEXT,)


def test_what_becomes_of_a_declared_route() -> None:
    route = RouteManifest(
        name="q1",
        description="",
        candidates=("m1", "m2"),
        budget_seconds=None,
        keep_alive_seconds=None,
        pin_primary=False,
    )
    assert decide_route(route, None) is Outcome.CREATED
    assert decide_route(route, replace(route)) is Outcome.UNCHANGED
    # The order of a ladder is what it is about.
    assert decide_route(route, replace(route, candidates=("m2", "m1"))) is Outcome.CONFIGURED
