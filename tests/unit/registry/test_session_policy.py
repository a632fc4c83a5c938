"""Who may have which names, and which heartbeats count."""

import pytest
from kit.failures import fails

from registry_svc.mesh.policy.heartbeat import (
    Admitted,
    HeartbeatKind,
    Holder,
    Opening,
    Repeated,
    decide_opening,
    validate_heartbeat,
)
from registry_svc.mesh.policy.namespace import NameOwners, Owner
from registry_svc.mesh.states import Session, Standing
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.reasons import Reason


def session(session_id: str, runner: str = "r1", *, incarnation: str = "life-1", request_id: str = "open-1") -> Session:
    return Session(id=session_id, request_id=request_id, runner=runner, incarnation=incarnation, ticket_key=b"k" * 32)


def live(session_id: str, runner: str = "r1") -> Holder:
    return Holder(session=session(session_id, runner), live=True)


def dead(session_id: str, runner: str = "r1") -> Holder:
    return Holder(session=session(session_id, runner), live=False)


def opening(*, incarnation: str = "life-2", request_id: str = "open-2") -> Opening:
    return Opening(request_id=request_id, runner="r1", incarnation=incarnation)


def decide(
    request: Opening,
    own: Holder | None = None,
    runner: Holder | None = None,
    models: dict[str, Holder] | None = None,
) -> Repeated | Admitted:
    wanted = [
        NameOwners(
            kind=ResourceKind.RUNNER,
            name="r1",
            owners=() if runner is None else (owner(ResourceKind.RUNNER, "r1", runner),),
        )
    ]
    for name, holder in (models or {}).items():
        wanted.append(NameOwners(kind=ResourceKind.MODEL, name=name, owners=(owner(ResourceKind.MODEL, name, holder),)))
    return decide_opening(request, own=own, runner_holder=runner, wanted=wanted)


def owner(kind: ResourceKind, name: str, holder: Holder) -> Owner:
    session = holder.session
    return Owner(kind=kind, name=name, session_id=session.id, runner=session.runner, live=holder.live)


def refused(
    request: Opening,
    own: Holder | None = None,
    runner: Holder | None = None,
    models: dict[str, Holder] | None = None,
) -> dict[str, str]:
    with fails(Reason.ALREADY_EXISTS) as refusal:
        decide(request, own, runner, models)
    return refusal.value.metadata


def test_free_names_create_a_new_session() -> None:
    assert decide(opening()) == Admitted(adopted=None, evicted=())


def test_session_that_holds_the_names_is_adopted_online_or_offline() -> None:
    for own in (live("s1"), dead("s1")):
        decision = decide(opening(), own, own, {"m1": own})
        assert decision == Admitted(adopted=own.session, evicted=())


def test_live_runner_of_another_session_is_refused() -> None:
    assert refused(opening(), runner=live("s1")) == {"owner_kind": "runner", "runner": "r1"}
    assert refused(opening(), own=dead("s2"), runner=live("s1")) == {"owner_kind": "runner", "runner": "r1"}


def test_live_model_of_another_session_is_refused() -> None:
    assert refused(opening(), models={"m1": live("s2", "r2")}) == {"owner_kind": "model", "model": "m1"}


def test_offline_runner_of_another_session_is_taken_over_and_that_session_ends() -> None:
    assert decide(opening(), runner=dead("s1")) == Admitted(adopted=None, evicted=("s1",))


def test_offline_model_of_another_session_is_taken_over_and_that_session_continues() -> None:
    decision = decide(opening(), models={"m1": dead("s2", "r2")})
    assert decision == Admitted(adopted=None, evicted=())


def test_session_may_rename_its_runner_only_if_the_old_one_is_offline() -> None:
    assert refused(opening(), own=live("s1", "r0")) == {"owner_kind": "runner", "runner": "r0"}
    own = dead("s1", "r0")
    assert decide(opening(), own=own) == Admitted(adopted=own.session, evicted=())


def test_renamed_runner_ends_the_offline_session_that_held_its_new_name() -> None:
    own = dead("s1", "r0")
    decision = decide(opening(), own=own, runner=dead("s2"))
    assert decision == Admitted(adopted=own.session, evicted=("s2",))


def test_identical_call_is_a_repeat_even_while_the_session_is_live() -> None:
    request = opening(incarnation="life-1", request_id="open-1")
    assert decide(request, runner=live("s1")) == Repeated(session("s1"))


@pytest.mark.parametrize(("incarnation", "request_id"), [("life-2", "open-1"), ("life-1", "open-2")])
def test_another_incarnation_or_call_is_not_a_repeat(incarnation: str, request_id: str) -> None:
    refused(opening(incarnation=incarnation, request_id=request_id), runner=live("s1"))


def validate(sequence: int, standing: Standing, last: int | None, incarnation: str = "life-1") -> HeartbeatKind:
    return validate_heartbeat(incarnation, sequence, session("s1"), standing, last)


@pytest.mark.parametrize(
    ("sequence", "last", "hearing"),
    [
        (0, None, HeartbeatKind.FRESH),
        (7, None, HeartbeatKind.FRESH),
        (8, 7, HeartbeatKind.FRESH),
        (900, 7, HeartbeatKind.FRESH),
        (7, 7, HeartbeatKind.REPEATED),
    ],
)
def test_newer_heartbeats_are_accepted_and_the_newest_may_be_repeated(
    sequence: int, last: int | None, hearing: HeartbeatKind
) -> None:
    assert validate(sequence, Standing.ACTIVE, last) is hearing


def test_older_heartbeat_is_stale() -> None:
    with fails(Reason.STALE_HEARTBEAT):
        validate(6, Standing.ACTIVE, 7)


@pytest.mark.parametrize("standing", list(Standing))
def test_heartbeat_of_another_incarnation_is_stale_for_any_sequence(standing: Standing) -> None:
    with fails(Reason.STALE_HEARTBEAT):
        validate(1_000, standing, 7, "life-0")


def test_heartbeat_revives_a_silent_session_but_not_a_closed_one() -> None:
    assert validate(8, Standing.SILENT, 7) is HeartbeatKind.FRESH
    with fails(Reason.SESSION_UNKNOWN):
        validate(8, Standing.CLOSED, 7)


def test_session_key_and_id_are_never_logged() -> None:
    shown = repr(session("ses-secret"))
    assert "kkk" not in shown
    assert "ses-secret" not in shown
