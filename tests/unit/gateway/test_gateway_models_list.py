from dataclasses import replace

from google.protobuf.timestamp_pb2 import Timestamp
from kit.fleet import runner_view

from gateway.openai.models import model_entry, model_list
from weft.api.registry.v1 import route_pb2, runner_pb2, settings_pb2
from weft.dispatch.fleet import FleetView, ModelView
from weft.kernel.requests.request_values import Operation, Skill


def view_of(*models: ModelView) -> FleetView:
    return FleetView(1, {}, {model.name: model for model in models})


def model(name: str, pool: str, *, active: bool = True, context_tokens: int = 0, created: int = 5) -> ModelView:
    return ModelView(
        name=name,
        pool=pool,
        runner="r",
        operations=frozenset({Operation.CHAT, Operation.COMPLETION}),
        remote=False,
        active=active,
        context_tokens=context_tokens,
        created_at_seconds=created,
    )


def test_empty_fleet_is_an_empty_list() -> None:
    assert model_list(FleetView()) == {"object": "list", "data": []}


def test_pool_entry_combines_its_active_members() -> None:
    view = view_of(
        model("a", "p", context_tokens=8192, created=9),
        model("b", "p", context_tokens=4096, created=7),
        model("c", "p", active=False, context_tokens=1, created=1),
    )
    assert model_entry(view, "p") == {
        "id": "p",
        "object": "model",
        "created": 7,
        "owned_by": "weft",
        "meta": {
            "status": "active",
            "context_tokens": 4096,
            "operations": ["chat", "completion"],
            "members": ["a", "b"],
            "remote": False,
        },
    }
    assert model_entry(view, "c") is None
    assert view.targets == {"a", "b", "c", "p"}


def test_name_that_is_pool_and_model_is_listed_once() -> None:
    view = view_of(model("a", "a"), model("b", "a"))
    entries = model_list(view)["data"]
    assert isinstance(entries, list)
    assert [entry["id"] for entry in entries] == ["a"]
    assert entries[0]["meta"]["members"] == ["a", "b"]


def test_pool_members_are_unlisted_but_can_be_queried_by_name() -> None:
    view = view_of(model("qwen-1", "qwen"), model("qwen-2", "qwen"), model("alone", "alone"), model("z", "zs"))
    assert [entry["id"] for entry in model_list(view)["data"]] == ["alone", "qwen", "zs"]
    for name in ("qwen-1", "qwen-2", "z"):
        assert model_entry(view, name) is not None
    assert view.targets >= {"qwen-1", "qwen-2", "z"}


def test_unknown_context_length_does_not_hide_a_known_one() -> None:
    view = view_of(model("a", "p", context_tokens=0), model("b", "p", context_tokens=4096))
    entry = model_entry(view, "p")
    assert entry is not None
    assert entry["meta"] == {
        "status": "active",
        "context_tokens": 4096,
        "operations": ["chat", "completion"],
        "members": ["a", "b"],
        "remote": False,
    }


def route(name: str, *candidates: str) -> route_pb2.Route:
    manifest = route_pb2.RouteManifest(name=name, candidates=candidates, description="Short ones")
    return route_pb2.Route(manifest=manifest, create_time=Timestamp(seconds=11))


def with_routes(view: FleetView, *routes: route_pb2.Route, cloud: bool = False) -> FleetView:
    settings = settings_pb2.MeshSettings(allow_cloud_fallback=cloud)
    return replace(view, routes={route.manifest.name: route for route in routes}, settings=settings)


def members(view: FleetView, name: str) -> object:
    entry = model_entry(view, name)
    if entry is None:
        return None
    assert isinstance(entry["meta"], dict)
    return entry["meta"]["members"]


def test_route_is_listed_after_the_models_with_its_fallbacks() -> None:
    view = with_routes(view_of(model("a", "p"), model("b", "p"), model("c", "q", active=False)), route("sum", "c", "p"))
    assert model_entry(view, "route/sum") == {
        "id": "route/sum",
        "object": "model",
        "created": 11,
        "owned_by": "weft",
        "meta": {
            "route": True,
            "candidates": ["c", "p"],
            "description": "Short ones",
            "status": "active",
            "context_tokens": 0,
            "operations": ["chat", "completion"],
            "members": ["a", "b"],
            "remote": False,
        },
    }
    entries = model_list(view)["data"]
    assert isinstance(entries, list)
    assert [entry["id"] for entry in entries] == ["p", "route/sum"]
    assert "route/sum" in view.targets
    assert model_entry(view, "sum") is None


def test_route_without_active_members_is_not_listed() -> None:
    view = with_routes(view_of(model("a", "p", active=False)), route("sum", "a", "gone"))
    assert model_entry(view, "route/sum") is None
    assert model_list(view)["data"] == []
    assert model_entry(view, "route/other") is None


def test_pool_member_in_a_route_is_used_as_a_single_model() -> None:
    view = with_routes(view_of(model("a", "p"), model("b", "p")), route("one", "a"), route("all", "p"))
    assert members(view, "route/one") == ["a"]
    assert members(view, "route/all") == ["a", "b"]


def test_remote_fallback_is_listed_only_if_remote_models_are_allowed() -> None:
    cloud = replace(model("cloud", "cloud"), remote=True)
    view = view_of(model("a", "a"), cloud)
    routes = (route("fallback", "a", "cloud"), route("primary", "cloud", "a"))
    closed, open_ = with_routes(view, *routes), with_routes(view, *routes, cloud=True)
    assert members(closed, "route/fallback") == ["a"]
    assert members(closed, "route/primary") == ["a", "cloud"]
    assert members(open_, "route/fallback") == ["a", "cloud"]
    alone = with_routes(view_of(cloud), *routes)
    assert members(alone, "route/fallback") is None


def test_skills_are_shown_if_every_member_declares_its_own() -> None:
    sees = replace(model("a", "p"), skills=frozenset({Skill.TEXT, Skill.IMAGE}))
    calls = replace(model("b", "p"), skills=frozenset({Skill.TEXT, Skill.TOOLS}))
    entry = model_entry(view_of(sees, calls), "p")
    assert entry is not None
    assert entry["meta"]["skills"] == ["text", "image", "tools"]
    silent = model_entry(view_of(sees, model("c", "p")), "p")
    assert silent is not None
    assert "skills" not in silent["meta"]


def test_adapter_entry_names_its_base_model() -> None:
    states = {
        "smol": runner_pb2.InstanceState(model="smol"),
        "pirate": runner_pb2.InstanceState(model="pirate", base_model="smol"),
    }
    models = {name: model(name, name) for name in states}
    view = FleetView(1, {"r": runner_view("r1", instances=states)}, models)
    found = {entry["id"]: entry["meta"].get("base_models") for entry in model_list(view)["data"]}
    assert found == {"smol": None, "pirate": ["smol"]}
