"""Routes: ordered lists of models or pools, tried one after the other, and their steps in the current mesh."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated

from annotated_types import Ge, Gt, Le, MaxLen, MinLen

from router_svc.policy.endpoints.candidates import Candidate, CandidateKey, Needs, Readiness
from router_svc.policy.endpoints.choice import PickRequest
from router_svc.policy.endpoints.load_balancer import Selection, Selector, choose_ejected
from router_svc.policy.endpoints.pool import Endpoint, EndpointGroup, Pool
from router_svc.policy.endpoints.route_conditions import RouteCondition
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.settings.setting_annotations import Name
from weft.kernel.values.names import ROUTE_PREFIX

MAX_SECONDS = 86_400 * 366
"""Longest time of a route that a file names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """An ordered list of models or pools for one kind of task, best first."""

    name: Name
    candidates: Annotated[tuple[Annotated[str, MinLen(1), MaxLen(256)], ...], MinLen(1), MaxLen(64)]
    """Names of models or pools; the first is the primary."""
    budget_seconds: Annotated[float, Gt(0), Le(MAX_SECONDS)] | None = None
    """Maximum time from arrival to end: a request that would take longer is refused, a running one is not cancelled.
    None: the request's own deadline."""
    keep_alive_seconds: Annotated[float, Ge(-1), Le(MAX_SECONDS)] | None = None
    """How long the model stays loaded after a request; negative: until it is unloaded; None: as configured."""
    pin_primary: bool = False
    """Whether requests wait for the primary while it exists at all."""
    conditions: Annotated[tuple[RouteCondition, ...], MaxLen(64)] = ()
    """Which requests candidates accept; one without conditions accepts all."""

    def skipped(
        self, spec: PlacementRequest, arrived: datetime, *, allow_remote: bool, budget_left: float
    ) -> tuple[tuple[str, str], ...]:
        """Return the names of the candidates that do not accept a request, each with the reason as text."""
        unmet = (
            (each, each.unmet(spec, arrived, allow_remote=allow_remote, budget_left=budget_left))
            for each in self.conditions
        )
        return tuple((each.candidate, why) for each, why in unmet if why)

    def runner_labels(self, name: str) -> frozenset[str]:
        """Return the labels that a runner must have to serve a candidate of the route."""
        return next((each.runner_labels for each in self.conditions if each.candidate == name), frozenset())


PRIMARY = 0


class RouteStep:
    """An entry of a route in the current mesh: a pool, or a model of a pool.

    It applies the route's rule for remote candidates: if it takes none, the request's permission is ignored.
    """

    __slots__ = ("_only", "gate", "labels", "name", "pool", "position", "takes_remote")

    def __init__(
        self,
        position: int,
        pool: Pool,
        only: Endpoint | None,
        *,
        takes_remote: bool,
        labels: frozenset[str] = frozenset(),
    ) -> None:
        self.position = position
        self.name = pool.name if only is None else only.candidate.model
        """Name of the entry: that of the pool or the model."""
        self.pool = pool
        self.takes_remote = takes_remote
        self.labels = labels
        """Labels that its runners must have."""
        self.gate = ""
        """Why the whole step cannot serve the current request, as text; empty: it can."""
        self._only = only

    # -- selection

    def needs(self, needs: Needs) -> Needs:
        """Return the needs that apply to the candidates of this step."""
        if self.labels:
            needs = replace(needs, labels=self.labels)
        return replace(needs, allow_remote=False) if needs.allow_remote and not self.takes_remote else needs

    def skip(self, needs: Needs) -> str:
        """Return why the conditions of this step exclude such requests, as text; empty: they do not."""
        return next((why for name, why in needs.skipped if name == self.name), "")

    def choose(self, selector: Selector, pick: PickRequest, now: float) -> Selection | None:
        """Select a free endpoint of this step; None: none is free for the request."""
        pick = self._allowed(pick)
        if self._only is None:
            return selector.choose(self.pool, pick, now)
        return self._alone(self._only) if self._is_free(self._only.is_open, pick) else None

    def choose_ejected(self, pick: PickRequest) -> Selection | None:
        """Select an endpoint of this step that is only unavailable because it is ejected."""
        pick = self._allowed(pick)
        if self._only is None:
            return choose_ejected(self.pool, pick)
        return self._alone(self._only) if self._is_free(self._only.is_spare, pick) else None

    def _alone(self, endpoint: Endpoint) -> Selection:
        return Selection(endpoint, self.pool.settings.policy.value)

    def has_usable(self, pick: PickRequest) -> bool:
        """Whether a healthy endpoint of this step takes such requests, now or once it has a free slot."""
        pick = self._allowed(pick)
        if self._only is None:
            return self.pool.has_usable(pick)
        return self._only.is_usable and self._fits(pick)

    def has_free(self) -> bool:
        """Whether some endpoint of this step may be free, at least for some requests."""
        if self._only is None:
            return self.pool.has_free
        return not self.pool.is_at_its_cap and (self._only.is_open or self._only.is_spare)

    def free_endpoints(self, needs: Needs, excluded: Collection[CandidateKey], most: int) -> Iterator[Endpoint]:
        """Yield endpoints of this step with a free slot for such requests, at most `most` of each kind."""
        groups = () if self.pool.is_at_its_cap else self.pool.fitting(self.needs(needs))
        for group in groups:
            if self._only is not None:
                some = [self._only] if self._only.group is group and self._only.is_open else []
            else:
                some = group.open if len(group.open) <= most else group.some_of_the_best(most)
            yield from (endpoint for endpoint in some if endpoint.key not in excluded)

    def permitted(self, needs: Needs, excluded: Collection[CandidateKey]) -> Iterator[Endpoint]:
        """Yield the endpoints of this step that meet the needs and are neither excluded nor down."""
        if self.skip(needs):
            return
        needs, endpoint = self.needs(needs), self._only
        if endpoint is None:
            yield from self.pool.permitted(needs, excluded)
        elif (
            endpoint.group in self.pool.fitting(needs)
            and endpoint.key not in excluded
            and endpoint.candidate.readiness is not Readiness.DOWN
        ):
            yield endpoint

    # -- members

    def endpoints(self) -> Iterator[Endpoint]:
        """Yield the endpoints of this step that the mesh's settings do not exclude."""
        return (endpoint for endpoint in self._all() if not self.leaves_out(endpoint))

    def labeled(self) -> Iterator[Endpoint]:
        """Yield those of `endpoints` that have the labels of this step."""
        return (endpoint for endpoint in self.endpoints() if self.labels <= endpoint.candidate.labels)

    def stripped(self) -> Iterator[Endpoint]:
        """Yield the remote endpoints that the mesh's settings exclude from this step."""
        return (endpoint for endpoint in self._all() if self.leaves_out(endpoint))

    def some_endpoints(self, groups: Sequence[EndpointGroup], most: int) -> Iterable[Endpoint]:
        """Return `Pool.some_endpoints`, including excluded remote ones."""
        return self.pool.some_endpoints(groups, most) if self._only is None else (self._only,)

    def leaves_out(self, endpoint: Endpoint) -> bool:
        """Whether the mesh's settings exclude this endpoint from this step."""
        return endpoint.candidate.remote and not self.takes_remote

    def holds(self, endpoint: Endpoint) -> bool:
        """Whether the endpoint belongs to this step."""
        return endpoint.pool is self.pool and self._only in (None, endpoint)

    def count(self) -> int:
        """Return the number of endpoints, including excluded remote ones."""
        return len(self.pool.endpoints) if self._only is None else 1

    def in_flight(self) -> int:
        """Return the number of requests that run on the endpoints."""
        return self.pool.in_flight if self._only is None else self._only.in_flight

    def _allowed(self, pick: PickRequest) -> PickRequest:
        if not self.labels and (self.takes_remote or not pick.needs.allow_remote):
            return pick
        return pick._replace(needs=self.needs(pick.needs))

    def _is_free(self, is_free: bool, pick: PickRequest) -> bool:
        return is_free and not self.pool.is_at_its_cap and self._fits(pick)

    def _fits(self, pick: PickRequest) -> bool:
        assert self._only is not None, "only a step with a single model is checked"
        return self._only.key not in pick.excluded and self._only.group in self.pool.fitting(pick.needs)

    def _all(self) -> Iterable[Endpoint]:
        return self.pool.endpoints.values() if self._only is None else (self._only,)


class ResolvedRoute:
    """A route applied to the pools and models of the mesh."""

    def __init__(self, route: Route, *, cloud_fallback: bool) -> None:
        self.route = route
        self._cloud_fallback = cloud_fallback

    def admits(self, candidate: Candidate, name: str) -> bool:
        """Whether a candidate may serve the entry with this name."""
        return self._cloud_fallback or not candidate.remote or self.route.candidates[PRIMARY] == name

    def steps(
        self, pool_called: Callable[[str], Pool | None], endpoint_of: Callable[[str], Endpoint | None]
    ) -> Iterator[RouteStep]:
        """Yield the entries that exist in the mesh, best first. A name of both a pool and a model is the pool's."""
        for position, name in enumerate(self.route.candidates):
            takes_remote, labels = position == PRIMARY or self._cloud_fallback, self.route.runner_labels(name)
            pool = pool_called(name)
            if pool is not None:
                yield RouteStep(position, pool, None, takes_remote=takes_remote, labels=labels)
                continue
            endpoint = endpoint_of(name)
            if endpoint is not None:
                yield RouteStep(position, endpoint.pool, endpoint, takes_remote=takes_remote, labels=labels)


class RouteTable:
    """All routes by their queues."""

    def __init__(self, routes: Mapping[str, Route], *, cloud_fallback: bool) -> None:
        self.queues = {
            f"{ROUTE_PREFIX}{name}": ResolvedRoute(route, cloud_fallback=cloud_fallback)
            for name, route in routes.items()
        }
        self._naming: dict[str, list[str]] = {}
        """Queues of the routes that list each name."""
        for queue, resolved in self.queues.items():
            for name in resolved.route.candidates:
                self._naming.setdefault(name, []).append(queue)

    def of(self, queue: str) -> ResolvedRoute | None:
        """Return the route of a queue; None: the queue is not a route's."""
        return self.queues.get(queue)

    def queues_with(self, candidate: Candidate, names: Sequence[str]) -> Iterator[str]:
        """Yield the queues of routes that a candidate serves under the given names; may repeat."""
        if self._naming:
            for name in names:
                yield from (queue for queue in self._naming.get(name, ()) if self.queues[queue].admits(candidate, name))
