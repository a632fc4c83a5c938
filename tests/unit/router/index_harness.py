"""A candidate index with members that are easy to write down."""

from collections.abc import Iterable, Mapping
from typing import Any

from router_svc.policy.endpoints.candidate_index import CandidateIndex
from router_svc.policy.endpoints.candidates import Candidate, Needs, Readiness
from router_svc.policy.endpoints.choice import Choice, PickRequest
from router_svc.policy.endpoints.routes import Route
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.pool_settings import ChoicePolicy, PoolSettings, Settings
from weft.kernel.requests.request_values import Operation

CHAT = Needs(Operation.CHAT)
ANYWHERE = Needs(Operation.CHAT, allow_remote=True)


def member(name: str = "a", pool: str = "p", **changes: Any) -> Candidate:
    """A model on a runner of its own."""
    fields: dict[str, Any] = {
        "model": name,
        "pool": pool,
        "runner": f"on-{name}",
        "incarnation": "1",
        "readiness": Readiness.READY,
        "slots": 4,
        "operations": frozenset({Operation.CHAT}),
        **changes,
    }
    return Candidate(**fields)


def index(
    *members: Candidate,
    policy: ChoicePolicy = ChoicePolicy.LEAST_LOADED,
    max_in_flight: int = 0,
    routes: Iterable[Route] = (),
    cloud_fallback: bool = True,
    limits: Mapping[str, Any] | None = None,
) -> CandidateIndex:
    """All pools have the same settings."""
    settings = Settings(default_pool=PoolSettings(policy=policy, max_in_flight=max_in_flight))
    made = CandidateIndex(settings, SchedulerLimits(**(limits or {})))
    for candidate in members:
        made.table.put(candidate)
    made.table.set_routes({route.name: route for route in routes}, cloud_fallback=cloud_fallback)
    return made


def pick(needs: Needs = CHAT, **changes: Any) -> PickRequest:
    return PickRequest(needs=needs, **changes)


def place(
    mesh: CandidateIndex, queue: str = "p", asked: PickRequest | None = None, now: float = 0.0
) -> Candidate | None:
    """Choose and take; None: no candidate was free."""
    choice = mesh.choose(queue, asked or pick(), now)
    if choice is None:
        return None
    mesh.take(choice.candidate)
    return choice.candidate


def placed(mesh: CandidateIndex, times: int, queue: str = "p", asked: PickRequest | None = None) -> list[str]:
    """The models that so many requests go to, one after the other; none of them ends."""
    found = [place(mesh, queue, asked) for _ in range(times)]
    return [candidate.model if candidate is not None else "nobody" for candidate in found]


def chosen(choice: Choice | None) -> str:
    """The model that was chosen."""
    return choice.candidate.model if choice is not None else "nobody"
