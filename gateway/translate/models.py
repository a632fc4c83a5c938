"""The fleet as OpenAI's list of models: every pool and every model that can be asked now."""

from collections.abc import Iterable

from weft.dispatch.fleet import FleetView, ModelView

OWNER = "weft"


def model_list(view: FleetView) -> dict[str, object]:
    """The body of GET /v1/models."""
    return {"object": "list", "data": [_entry(name, members) for name, members in _by_name(view).items()]}


def model_entry(view: FleetView, name: str) -> dict[str, object] | None:
    """The body of GET /v1/models/{name}; None if nothing of this name can be asked."""
    members = _by_name(view).get(name)
    return None if members is None else _entry(name, members)


def known_names(view: FleetView) -> frozenset[str]:
    """Every name a request may carry, asleep or not."""
    return frozenset(view.models) | frozenset(model.pool for model in view.models.values())


def _by_name(view: FleetView) -> dict[str, list[ModelView]]:
    """Active models by each name that reaches them, sorted. A pool wins over a model of the same name."""
    names: dict[str, list[ModelView]] = {}
    active = [model for model in view.models.values() if model.active]
    for model in active:
        names.setdefault(model.pool, []).append(model)
    for model in active:
        names.setdefault(model.name, [model])
    return dict(sorted(names.items()))


def _entry(name: str, members: list[ModelView]) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": min(model.created_at_seconds for model in members),
        "owned_by": OWNER,
        "meta": {
            "context_tokens": min((model.context_tokens for model in members if model.context_tokens), default=0),
            "operations": _operations(members),
            "members": sorted(model.name for model in members),
            "remote": any(model.remote for model in members),
        },
    }


def _operations(members: Iterable[ModelView]) -> list[str]:
    operations = set().union(*(model.operations for model in members))
    return [operation.name.lower() for operation in sorted(operations)]
