"""Routes as people write them and as they read them."""

import pytest
from kit.resource_samples import some_event, some_route

from weft.api.registry.v1 import model_pb2, route_pb2
from weft.documents.codec import document_of
from weft.documents.kinds.route import check_route
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import (
    AnyDocument,
    ModelDocument,
    declared,
    model_document,
    observed_document,
    plain,
)
from weft.documents.yaml_documents import parse_document, yaml_text
from weft.kernel.time.timestamps import optional_seconds


def read(**fields: object) -> AnyDocument:
    found = parse_document({"kind": "Route", "name": "q", "candidates": ["a"], **fields})
    assert found.kind is ResourceKind.ROUTE
    return found


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("5m", 300), (300, 300), (1.5, 1.5), ("90s", 90), ("1h30m", 5_400), (0, 0), ("0", 0), (-1, -1), ("-5m", -1)],
)
def test_keep_alive_is_written_as_elsewhere(written: object, seconds: float) -> None:
    route = read(keepAlive=written)
    assert optional_seconds(route.declared, "keep_alive") == seconds
    manifest = route.declared
    assert manifest.keep_alive.ToNanoseconds() == seconds * 1e9
    # And read back from the registry it is the same, with the shortest number that says it.
    told = observed_document(ResourceKind.ROUTE, route_pb2.Route(manifest=manifest))
    assert optional_seconds(told.declared, "keep_alive") == seconds
    assert str(plain(told)["keepAlive"]) == f"{seconds:g}"


@pytest.mark.parametrize("seconds", [0.067, 0.57, 1.1, 8.3, 16.1, 86_399.999])
def test_budget_of_8_3_s_round_trips_without_rounding_error(seconds: float) -> None:
    manifest = read(budgetSeconds=seconds, keepAlive=seconds).declared
    check_route(manifest, "route")
    told = observed_document(ResourceKind.ROUTE, route_pb2.Route(manifest=manifest))
    assert (optional_seconds(told.declared, "budget"), optional_seconds(told.declared, "keep_alive")) == (
        seconds,
        seconds,
    )


def test_budget_below_a_nanosecond_is_not_lost() -> None:
    manifest = read(budgetSeconds=1e-12).declared
    assert manifest.budget.ToNanoseconds() == 1


def test_unset_route_fields_stay_unset() -> None:
    manifest = read().declared
    assert (manifest.HasField("keep_alive"), manifest.HasField("budget")) == (False, False)
    assert yaml_text(declared(read())) == "kind: route\nname: q\ncandidates:\n- a\n"


def test_complete_route_in_yaml_is_idiomatic() -> None:
    assert yaml_text(declared(observed_document(ResourceKind.ROUTE, some_route()))) == (
        "kind: route\nname: summaries\ndescription: Short ones\ncandidates:\n- qwen\n- big\n"
        "budgetSeconds: 90.5\nkeepAlive: 300\npinPrimary: true\n"
    )


@pytest.mark.parametrize(
    ("status", "state", "ready", "reason"),
    [
        (route_pb2.Route.STATUS_ACTIVE, "active", "True", "Active"),
        (route_pb2.Route.STATUS_HIBERNATING, "hibernating", "False", "Hibernating"),
        (route_pb2.Route.STATUS_INACTIVE, "inactive", "False", "NoActiveCandidate"),
        (route_pb2.Route.STATUS_UNSPECIFIED, "unknown", "False", "NoActiveCandidate"),
    ],
)
def test_route_shows_if_it_can_answer_and_why_not(
    status: route_pb2.Route.Status.ValueType, state: str, ready: str, reason: str
) -> None:
    told = some_route()
    told.status = status
    found = observed_document(ResourceKind.ROUTE, told)
    (condition,) = found.conditions
    assert (found.state, condition.type, condition.status, condition.reason) == (state, "Ready", ready, reason)


def test_mesh_event_refers_to_the_mesh() -> None:
    event = some_event(name="settings")
    event.kind = "mesh"
    document = document_of(event)
    assert (document["resourceKind"], document["resourceName"]) == ("mesh", "settings")


def test_skills_round_trip_through_the_registry() -> None:
    document = parse_document({"kind": "model", "name": "m", "skills": ["text", "image", "audio", "tools"]})
    manifest = document.manifest
    assert list(manifest.skills) == [1, 2, 3, 4]
    # One that this version does not know is passed over: one odd row must not make a list unreadable.
    manifest.skills.append(model_pb2.ModelSkill.ValueType(99))
    back = model_document(model_pb2.Model(manifest=manifest))
    assert isinstance(back, ModelDocument)
    assert declared(back)["skills"] == ["text", "image", "audio", "tools"]
