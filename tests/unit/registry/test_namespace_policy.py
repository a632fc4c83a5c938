"""No name ever belongs to two kinds, whoever asks in whatever order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry_svc.mesh.policy.declarations import Author, settled_owner
from registry_svc.mesh.policy.namespace import NameOwners, Owner, may_share, require_free, sessions_to_end
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason


def claim(kind: ResourceKind, *owners: Owner) -> NameOwners:
    return NameOwners(kind=kind, name="x", owners=owners)


def held(kind: ResourceKind, session: str = "s2", *, live: bool = True, runner: str = "r2") -> Owner:
    return Owner(kind=kind, name="x", session_id=session, runner=runner, live=live)


def declared(kind: ResourceKind, runner: str = "") -> Owner:
    return Owner(kind=kind, name="x", runner=runner)


def refusal(*claims: NameOwners) -> dict[str, str]:
    with pytest.raises(WeftError) as refused:
        sessions_to_end(claims, own_session="s1", runner="r1")
    assert refused.value.reason is Reason.ALREADY_EXISTS
    return refused.value.metadata


@pytest.mark.parametrize("wanted", list(ResourceKind))
@pytest.mark.parametrize("owned", list(ResourceKind))
def test_live_foreign_name_is_refused_unless_model_and_pool_share_it(wanted: ResourceKind, owned: ResourceKind) -> None:
    one = claim(wanted, held(owned))
    if may_share(wanted, owned):
        assert sessions_to_end([one], own_session="s1", runner="r1") == frozenset()
    else:
        assert refusal(one) == {"owner_kind": owned.value, owned.value: "x"}


@pytest.mark.parametrize("wanted", list(ResourceKind))
@pytest.mark.parametrize("owned", list(ResourceKind))
def test_own_earlier_rows_do_not_conflict(wanted: ResourceKind, owned: ResourceKind) -> None:
    assert sessions_to_end([claim(wanted, held(owned, "s1"))], own_session="s1", runner="r1") == frozenset()


def test_offline_model_or_agent_is_replaced_individually_and_other_kinds_end_their_session() -> None:
    for kind in (ResourceKind.MODEL, ResourceKind.AGENT):
        assert sessions_to_end([claim(kind, held(kind, live=False))], own_session="", runner="r1") == frozenset()
    for wanted, owned in (
        (ResourceKind.RUNNER, ResourceKind.RUNNER),
        (ResourceKind.AGENT, ResourceKind.MODEL),
        (ResourceKind.POOL, ResourceKind.AGENT),
    ):
        assert sessions_to_end([claim(wanted, held(owned, live=False))], own_session="", runner="r1") == {"s2"}


def test_publication_coexists_with_a_declaration_unless_it_pins_another_runner() -> None:
    assert (
        sessions_to_end([claim(ResourceKind.MODEL, declared(ResourceKind.MODEL))], own_session="", runner="r1")
        == frozenset()
    )
    assert (
        sessions_to_end([claim(ResourceKind.MODEL, declared(ResourceKind.MODEL, "r1"))], own_session="", runner="r1")
        == frozenset()
    )
    assert refusal(claim(ResourceKind.MODEL, declared(ResourceKind.MODEL, "r2"))) == {
        "owner_kind": "model",
        "model": "x",
    }
    assert (
        sessions_to_end([claim(ResourceKind.AGENT, declared(ResourceKind.AGENT))], own_session="", runner="r1")
        == frozenset()
    )
    assert refusal(claim(ResourceKind.AGENT, declared(ResourceKind.MODEL))) == {"owner_kind": "model", "model": "x"}


def test_operator_is_refused_names_of_other_kinds_even_if_offline() -> None:
    require_free(
        [claim(ResourceKind.MODEL, held(ResourceKind.MODEL), declared(ResourceKind.MODEL), held(ResourceKind.POOL))]
    )
    for owned in (ResourceKind.AGENT, ResourceKind.RUNNER):
        with pytest.raises(WeftError):
            require_free([claim(ResourceKind.MODEL, held(owned, live=False))])


sessions = st.sampled_from(["s1", "s2", "s3"])

rows = st.sets(
    st.tuples(
        st.sampled_from([ResourceKind.MODEL, ResourceKind.AGENT, ResourceKind.RUNNER, ResourceKind.POOL]),
        st.sampled_from("xyz"),
    )
)


@settings(deadline=None)  # a busy machine is not a failure
@given(st.lists(st.tuples(sessions, rows, st.booleans()), max_size=12))
def test_admission_leaves_every_name_with_one_kind(
    script: list[tuple[str, set[tuple[ResourceKind, str]], bool]],
) -> None:
    """A small mesh of sets: sessions claim rows; some die; the policy alone keeps the names unique."""
    held_rows: dict[str, set[tuple[ResourceKind, str]]] = {}
    dead: set[str] = set()
    for session, wanted, dies in script:
        if not clashes(wanted):
            claims = [NameOwners(kind=k, name=n, owners=owners(held_rows, dead, n)) for k, n in sorted(wanted, key=str)]
            try:
                ended = sessions_to_end(claims, own_session=session, runner=session)
            except WeftError:
                continue
            held_rows = {
                each: {row for row in rows_ if row not in wanted}
                for each, rows_ in held_rows.items()
                if each not in {session, *ended}
            }
            held_rows[session] = wanted
            dead.discard(session)
        if dies:
            dead.add(session)
        assert not clashes({row for rows_ in held_rows.values() for row in rows_})


def owners(held_rows: dict[str, set[tuple[ResourceKind, str]]], dead: set[str], name: str) -> tuple[Owner, ...]:
    return tuple(
        Owner(kind=kind, name=name, session_id=session, runner=session, live=session not in dead)
        for session, rows_ in held_rows.items()
        for kind, owned in sorted(rows_, key=str)
        if owned == name
    )


def clashes(rows_: set[tuple[ResourceKind, str]]) -> bool:
    return any(
        one[1] == other[1] and one != other and not may_share(one[0], other[0]) for one in rows_ for other in rows_
    )


def test_uniqueness_check_can_fail() -> None:
    assert clashes({(ResourceKind.MODEL, "x"), (ResourceKind.AGENT, "x")})
    assert not clashes({(ResourceKind.MODEL, "x"), (ResourceKind.POOL, "x"), (ResourceKind.AGENT, "y")})


def test_route_shares_its_name_with_no_other_resource() -> None:
    assert not any(may_share(ResourceKind.ROUTE, other) for other in ResourceKind)
    for other in set(ResourceKind) - {ResourceKind.ROUTE}:
        with pytest.raises(WeftError) as refused:
            require_free([claim(ResourceKind.ROUTE, held(other, live=False))])
        assert refused.value.metadata["owner_kind"] == other.value
    assert refusal(claim(ResourceKind.MODEL, declared(ResourceKind.ROUTE))) == {"owner_kind": "route", "route": "x"}


ANY, OWN = Author(name="key:ann"), Author(name="key:ann", own_only=True)


@pytest.mark.parametrize(
    ("author", "given", "earlier", "after"),
    [
        (OWN, "", None, "key:ann"),
        (OWN, "key:ann", None, "key:ann"),
        (OWN, "", "", ""),
        (OWN, "", "key:bob", "key:bob"),
        (OWN, "key:bob", "key:bob", "key:bob"),
        (OWN, "key:bob", "key:ann", "key:bob"),
        (ANY, "key:bob", None, "key:bob"),
        (ANY, "key:ann", "key:bob", "key:ann"),
        (Author(), "", None, ""),
        (Author(), "team-a", "", "team-a"),
    ],
)
def test_new_resource_belongs_to_its_creator_and_an_unset_owner_changes_nothing(
    author: Author, given: str, earlier: str | None, after: str
) -> None:
    assert settled_owner(given, author, earlier=earlier, field="owner") == after


@pytest.mark.parametrize(
    ("given", "earlier"), [("key:bob", None), ("key:ann", "key:bob"), ("key:ann", ""), ("key:cid", "key:bob")]
)
def test_author_with_own_scope_cannot_take_over_a_resource(given: str, earlier: str | None) -> None:
    assert settled_owner(given, ANY, earlier=earlier, field="owner") == given, "whoever may edit every model may"
    with pytest.raises(FieldError) as refused:
        settled_owner(given, OWN, earlier=earlier, field="owner")
    assert (refused.value.reason, refused.value.field) == (Reason.PERMISSION_DENIED, "owner")
    assert "models:edit" in refused.value.message
