from gateway.translate.models import known_names, model_entry, model_list
from weft.dispatch.fleet import FleetView, ModelView
from weft.kernel.request import Operation


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


def test_an_empty_fleet_is_an_empty_list() -> None:
    assert model_list(FleetView()) == {"object": "list", "data": []}


def test_a_pool_speaks_for_its_active_members() -> None:
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
    assert known_names(view) == {"a", "b", "c", "p"}


def test_a_name_that_is_pool_and_model_is_listed_once() -> None:
    view = view_of(model("a", "a"), model("b", "a"))
    entries = model_list(view)["data"]
    assert isinstance(entries, list)
    assert [entry["id"] for entry in entries] == ["a", "b"]
    assert entries[0]["meta"]["members"] == ["a", "b"]


def test_an_unknown_context_does_not_hide_a_known_one() -> None:
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
