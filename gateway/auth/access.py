"""What each route asks of its caller. `tests/component/gateway/test_gateway_keys.py` finds what is missing."""

from weft.kernel.principal import Access, Resource, Role

_READS = ("GET", "HEAD")


def _reads(resource: Resource) -> dict[str, Access]:
    return dict.fromkeys(_READS, Access(resource, Role.VIEW))


def _all_of(resource: Resource) -> dict[str, Access]:
    """Reading it, making new ones, and changing or deleting what is there."""
    edit = Access(resource, Role.EDIT)
    return {
        **_reads(resource),
        "POST": Access(resource, Role.CREATE),
        "PUT": edit,
        "PATCH": edit,
        "DELETE": edit,
    }


_INFERENCE = _all_of(Resource.INFERENCE)
_OPERATIONS = _all_of(Resource.OPERATIONS)
_MODELS = _all_of(Resource.MODELS) | {"POST": Access(Resource.MODELS, Role.EDIT)}

OPEN_PATHS = frozenset({"/health"})
"""Answered to strangers: probes have no keys."""

_CHANGES = frozenset({"cancel", "rotate"})
"""Last parts of paths whose POST changes what is there, and makes nothing new."""

_RULES: dict[str, dict[str, Access]] = {
    "/metrics": _reads(Resource.TELEMETRY),
    "/openapi.json": _reads(Resource.MODELS),
    "/rerank": _INFERENCE,
    "/tokenize": _INFERENCE,
    "/v1/audio": _INFERENCE,
    "/v1/chat/completions": _INFERENCE,
    "/v1/completions": _INFERENCE,
    "/v1/embeddings": _INFERENCE,
    "/v1/images": _INFERENCE,
    "/v1/messages": _INFERENCE,
    "/v1/requests": _INFERENCE,
    "/v1/rerank": _INFERENCE,
    "/v1/responses": _INFERENCE,
    "/v1/tokenize": _INFERENCE,
    "/v1/files": _INFERENCE,
    "/v1/batches": _INFERENCE,
    "/api/v1/inference-tasks": _INFERENCE,
    "/v1/models": _reads(Resource.MODELS),
    "/v1/clients": _reads(Resource.TELEMETRY),
    "/v1/capabilities": _reads(Resource.RUNNERS),
    "/v1/models/load": _OPERATIONS,
    "/v1/models/unload": _OPERATIONS,
    "/v1/cache/flush": _OPERATIONS,
    "/v1/admin": _OPERATIONS,
    "/api/v1/models": _MODELS,
    "/api/v1/pools": _MODELS,
    "/api/v1/agents": _MODELS,
    "/api/v1/routes": _MODELS,
    "/api/v1/apply": _MODELS,
    "/api/v1/runners": _all_of(Resource.RUNNERS),
    "/api/v1/events": _reads(Resource.TELEMETRY),
    "/api/v1/config": _all_of(Resource.SETTINGS),
    "/api/v1/keys": _all_of(Resource.KEYS),
}


def is_open(path: str) -> bool:
    """Whether strangers may ask for it."""
    return path in OPEN_PATHS


def access_of(method: str, path: str) -> Access | None:
    """What a request asks for, by the longest path that it begins with; None: there is no such route."""
    beginning, action = path, path.rpartition("/")[2]
    while beginning:
        rule = _RULES.get(beginning)
        if rule is not None:
            return rule.get("PATCH" if method == "POST" and action in _CHANGES else method)
        beginning = beginning.rpartition("/")[0]
    return None
