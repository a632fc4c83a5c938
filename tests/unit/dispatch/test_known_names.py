"""Names that a request may carry, and the sentence for one that nothing has."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from weft.api.common.v1 import chat_pb2
from weft.api.registry.v1 import route_pb2
from weft.dispatch.agents import KnownNames
from weft.dispatch.fleet import FleetView, ModelView
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation, Skill
from weft.kernel.values.unknown_names import unknown_target


class Fleet:
    def __init__(self, view: FleetView) -> None:
        self.view = view


def model(name: str, pool: str, *, active: bool = True) -> ModelView:
    return ModelView(
        name=name,
        pool=pool,
        runner="r",
        operations=frozenset({Operation.CHAT}),
        remote=False,
        active=active,
        context_tokens=0,
        created_at_seconds=1,
    )


def view_of(*models: ModelView, routes: Mapping[str, route_pb2.Route] | None = None, revision: int = 1) -> FleetView:
    return FleetView(revision, {}, {each.name: each for each in models}, routes=routes or {})


ROUTE = route_pb2.Route(manifest=route_pb2.RouteManifest(name="sum", candidates=["qwen"]))
VIEW = view_of(model("qwen-a", "qwen"), model("laptop", "laptop", active=False), routes={"sum": ROUTE})


@pytest.mark.parametrize("name", ["qwen-a", "qwen", "laptop", "route/sum"])
def test_configured_name_is_known_while_its_runner_is_offline(name: str) -> None:
    assert name in VIEW.targets
    KnownNames(Fleet(VIEW)).require(name, "model")


@pytest.mark.parametrize(("name", "close"), [("qwen-aa", "qwen-a"), ("latop", "laptop"), ("route/sums", "route/sum")])
def test_misspelled_name_is_refused_with_close_matches(name: str, close: str) -> None:
    with pytest.raises(FieldError) as refused:
        KnownNames(Fleet(VIEW)).require(name, "lines[3].spec.model")
    assert (refused.value.reason, refused.value.field) == (Reason.MODEL_NOT_FOUND, "lines[3].spec.model")
    bare = name.removeprefix("route/")
    assert f" {bare}; did you mean {close}" in refused.value.message
    assert refused.value.metadata["close_names"].split(",")[0] == close
    assert "wait_for_model" in refused.value.message


def test_name_without_close_matches_is_truncated_in_the_error() -> None:
    assert (
        unknown_target("zzz", ["qwen"]).message
        == "there is no model, pool, agent, route or workflow zzz; there is qwen"
    )
    assert len(unknown_target("x" * 5000, []).message) < 250


def test_every_name_passes_before_the_snapshot_and_changes_apply_immediately() -> None:
    fleet = Fleet(view_of(revision=0))
    names = KnownNames(fleet)
    names.require("new", "model")
    fleet.view = VIEW
    with pytest.raises(FieldError):
        names.require("new", "model")
    fleet.view = view_of(model("new", "new"), revision=2)
    names.require("new", "model")


def seeing() -> chat_pb2.ChatPayload:
    image = chat_pb2.ContentPart(image=chat_pb2.MediaPart(data=b"png", media_type="image/png"))
    return chat_pb2.ChatPayload(messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[image])])


TEXT_ONLY = frozenset({Skill.TEXT})
SEES = frozenset({Skill.TEXT, Skill.IMAGE})


@pytest.mark.parametrize(
    ("skills", "name", "is_refused"),
    [
        ((TEXT_ONLY, TEXT_ONLY), "qwen", True),
        ((TEXT_ONLY, TEXT_ONLY), "a", True),
        ((TEXT_ONLY, TEXT_ONLY), "route/sum", True),
        ((TEXT_ONLY, SEES), "qwen", False),
        ((TEXT_ONLY, None), "route/sum", False),
        ((TEXT_ONLY, TEXT_ONLY), "nobody", False),
    ],
)
def test_unsupported_work_is_refused_at_submission(
    skills: tuple[frozenset[Skill] | None, ...], name: str, is_refused: bool
) -> None:
    models = [replace(model(each, "qwen"), skills=known) for each, known in zip("ab", skills, strict=True)]
    names = KnownNames(Fleet(view_of(*models, routes={"sum": ROUTE})))
    names.require_taken(name, chat_pb2.ChatPayload(), "spec.model")
    if not is_refused:
        names.require_taken(name, seeing(), "spec.model")
        return
    with pytest.raises(FieldError, match=f"{name} does not support images") as refused:
        names.require_taken(name, seeing(), "spec.model")
    assert (refused.value.field, refused.value.reason) == ("spec.model", Reason.MODALITY_UNSUPPORTED)
