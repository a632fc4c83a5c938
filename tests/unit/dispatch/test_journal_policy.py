"""Which requests are durable tasks without their callers asking: by model, by tenant, and for the whole mesh."""

from dataclasses import dataclass, field, replace

import pytest
from kit.resources import snapshot

from weft.api.registry.v1 import agent_pb2, journal_pb2, model_pb2, route_pb2, settings_pb2
from weft.api.registry.v1.registry_service_pb2 import WatchResponse
from weft.dispatch.fleet import FleetView, ModelView, apply_watch, expected_model
from weft.dispatch.request_receipt import WhenLeft
from weft.durable.journal_policy import JournalPolicy, JournalRules, journal_mode
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import JournalMode, Operation

UNSET, NONE, WAIT, KEEP = JournalMode.UNSET, JournalMode.NONE, JournalMode.WAIT, JournalMode.KEEP
MODES = (UNSET, NONE, WAIT, KEEP)


def a_model(name: str, journal: JournalMode = UNSET, *, pool: str = "") -> ModelView:
    return expected_model(name, pool, "r1", journal)


def mesh(*models: ModelView, journal: JournalMode = UNSET) -> FleetView:
    settings = settings_pb2.MeshSettings(journal=journal_pb2.JournalMode.ValueType(journal))
    return FleetView(1, {}, {model.name: model for model in models}, settings=settings)


@dataclass
class Fleet:
    view: FleetView = field(default_factory=FleetView)


@pytest.mark.parametrize("of_model", MODES)
@pytest.mark.parametrize("of_tenant", MODES)
@pytest.mark.parametrize("of_mesh", MODES)
def test_model_setting_precedes_tenant_setting_which_precedes_mesh_setting(
    of_model: JournalMode, of_tenant: JournalMode, of_mesh: JournalMode
) -> None:
    view = mesh(a_model("tiny", of_model), journal=of_mesh)
    first = next((mode for mode in (of_model, of_tenant, of_mesh) if mode), NONE)
    assert journal_mode(view, "tiny", of_tenant) is first
    policy = JournalPolicy(Fleet(view), JournalRules(tenants={"ann": of_tenant}))
    assert policy.mode_of("tiny", "ann") is first


def test_no_request_is_journaled_if_durability_is_unset() -> None:
    policy = JournalPolicy(Fleet(mesh(a_model("tiny"))))
    assert [policy.required("tiny", "ann", operation) for operation in Operation] == [None] * len(Operation)


def test_name_with_several_models_has_their_strongest_mode() -> None:
    agent = agent_pb2.Agent(manifest=agent_pb2.AgentManifest(name="critic", pool="pool"))
    ladder = route_pb2.Route(manifest=route_pb2.RouteManifest(name="cheap", candidates=["plain", "pool"]))
    models = (a_model("one", NONE, pool="pool"), a_model("two", KEEP, pool="pool"), a_model("plain"))
    view = replace(mesh(*models), agents={"critic": agent}, routes={"cheap": ladder})
    for name in ("pool", "one", "two", "agent/critic", "route/cheap"):
        assert journal_mode(view, name, UNSET) is KEEP, name
    assert journal_mode(view, "plain", UNSET) is NONE
    # A member of the pool may answer a request for another one by its name.
    assert journal_mode(view, "auto", UNSET) is KEEP


def test_mesh_setting_change_applies_from_the_next_request() -> None:
    fleet = Fleet(mesh(a_model("tiny")))
    policy = JournalPolicy(fleet)
    assert policy.required("tiny", "ann", Operation.CHAT) is None
    fleet.view = mesh(a_model("tiny", WAIT))
    assert policy.required("tiny", "ann", Operation.CHAT) is WhenLeft.CANCEL
    fleet.view = mesh(a_model("tiny"), journal=KEEP)
    assert policy.required("tiny", "ann", Operation.CHAT) is WhenLeft.KEEP


def test_unlisted_tenant_has_the_default_tenant_mode() -> None:
    rules = JournalRules(default_tenant=WAIT, tenants={"ann": UNSET, "bob": NONE})
    policy = JournalPolicy(Fleet(mesh(a_model("tiny"))), rules)
    assert [policy.mode_of("tiny", tenant) for tenant in ("ann", "bob", "eve")] == [NONE, NONE, WAIT]


@pytest.mark.parametrize("operation", [Operation.IMAGE, Operation.TRANSCRIPTION, Operation.SPEECH])
def test_images_and_audio_are_journaled_like_chats(operation: Operation) -> None:
    policy = JournalPolicy(Fleet(mesh(a_model("tiny"), journal=WAIT)))
    assert policy.required("tiny", "ann", operation) is WhenLeft.CANCEL


def test_request_that_must_but_cannot_be_journaled_is_refused() -> None:
    policy = JournalPolicy(Fleet(mesh(a_model("tiny"), journal=WAIT)))
    with pytest.raises(FieldError, match="a rerank request cannot be") as refused:
        policy.required("tiny", "ann", Operation.RERANK)
    assert (refused.value.reason, refused.value.field) == (Reason.UNSUPPORTED_OPERATION, "model")


def test_token_count_is_not_inference_and_never_journaled() -> None:
    policy = JournalPolicy(Fleet(mesh(a_model("tiny", KEEP))))
    assert policy.required("tiny", "ann", Operation.TOKENIZE) is None


def test_request_that_must_be_journaled_is_refused_without_tasks() -> None:
    policy = JournalPolicy(Fleet(mesh(a_model("tiny", KEEP), a_model("plain"))), is_possible=False)
    assert policy.required("plain", "ann", Operation.CHAT) is None
    with pytest.raises(FieldError, match="send them to the endpoint of the mesh"):
        policy.required("tiny", "ann", Operation.CHAT)


def test_name_only_the_router_can_resolve_is_refused_if_it_may_need_journaling() -> None:
    with pytest.raises(FieldError, match="a task needs the name"):
        JournalPolicy(Fleet(mesh(a_model("tiny", KEEP)))).required("auto", "ann", Operation.CHAT)
    assert JournalPolicy(Fleet(mesh(a_model("tiny")))).required("auto", "ann", Operation.CHAT) is None


def test_unknown_mode_is_treated_as_the_strongest() -> None:
    manifest = model_pb2.ModelManifest(name="tiny", journal=9)  # type: ignore[arg-type]
    view = apply_watch(FleetView(), WatchResponse(revision=1, snapshot=snapshot(model_pb2.Model(manifest=manifest))))
    assert view.models["tiny"].journal is KEEP
