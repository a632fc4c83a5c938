"""All endpoints by model, runner, pool and queue.

Pools and routes are queues of requests; a route's members are those of its steps. Adding, changing and removing a
candidate costs O(log n) in the candidates of its pool. A runner with a request limit over all models costs O(models)
each time it reaches or leaves that limit.
"""

from collections.abc import Collection, Mapping, Sequence

from router_svc.policy.endpoints.candidates import Candidate, CandidateKey, EngineKey, RunnerKey
from router_svc.policy.endpoints.circuit_breaker import EndpointHealth
from router_svc.policy.endpoints.load_balancer import rank_for
from router_svc.policy.endpoints.pool import Endpoint, EngineSlots, Pool, RunnerLoad
from router_svc.policy.endpoints.routes import PRIMARY, ResolvedRoute, Route, RouteStep, RouteTable
from router_svc.policy.limits import SchedulerLimits
from router_svc.policy.pool_settings import Settings
from weft.kernel.values.names import ROUTE_PREFIX


class EndpointTable:
    """Holds every candidate of the mesh in its pool, with what this router has granted it."""

    def __init__(self, settings: Settings, limits: SchedulerLimits) -> None:
        self._settings = settings
        self._limits = limits
        self.pools: dict[str, Pool] = {}
        """By name. Read-only."""
        self._pool_steps: dict[str, tuple[RouteStep, ...]] = {}
        self._by_model: dict[str, Endpoint] = {}
        self.by_key: dict[CandidateKey, Endpoint] = {}
        """The endpoints in `_by_model`, and those that left the mesh while requests still run on them. Read-only."""
        self._engines: dict[EngineKey, EngineSlots] = {}
        self._runners: dict[RunnerKey, RunnerLoad] = {}
        self._routes = RouteTable({}, cloud_fallback=False)
        self._held: dict[CandidateKey, str] = {}
        """Held endpoints, each with the model to be loaded in its place."""
        self.freed: dict[str, None] = {}
        """See `take_freed`; ordered to make runs reproducible. Read-only."""

    # -- membership

    def put(self, candidate: Candidate) -> None:
        """Add or update a candidate. A new runner incarnation starts with a clean health record."""
        endpoint = self._by_model.get(candidate.model)
        if endpoint is not None and _place_of(endpoint.candidate) != _place_of(candidate):
            self.drop(candidate.model)
            endpoint = None
        if endpoint is None:
            self._add(candidate)
            return
        if endpoint.candidate == candidate:
            return
        endpoint.runner.change_limit(endpoint.candidate.runner_max_requests, candidate.runner_max_requests)
        # Only a changed count proves a new report; other fields may change long after the last one.
        is_new = candidate.slots_reported_used != endpoint.candidate.slots_reported_used
        is_other = is_new and endpoint.engine_slots.note_used(candidate.slots_reported_used)
        endpoint.pool.change(endpoint, candidate)
        if is_other:
            self._settle_others(endpoint)
        self.note_change(endpoint)

    def drop(self, model: str) -> None:
        """Remove a model; its running requests count until they end."""
        endpoint = self._by_model.pop(model, None)
        if endpoint is None:
            return
        endpoint.pool.remove(endpoint)
        del endpoint.runner.endpoints[endpoint.key], endpoint.engine_slots.endpoints[endpoint.key]
        endpoint.runner.change_limit(endpoint.candidate.runner_max_requests, 0)
        self.note_change(endpoint)
        self.forget_if_unused(endpoint)

    def set_routes(self, routes: Mapping[str, Route], *, cloud_fallback: bool) -> None:
        """Replace all routes. `cloud_fallback`: whether they may fall back to remote candidates."""
        self._routes = RouteTable(routes, cloud_fallback=cloud_fallback)
        self.freed |= dict.fromkeys(self._routes.queues)

    def hold(self, keys: frozenset[CandidateKey], instead: Mapping[CandidateKey, str] | None = None) -> None:
        """Hold exactly these endpoints: they take no new requests.

        `instead`: the models to be loaded in their places, for explanations.
        """
        models = instead or {}
        was, self._held = self._held, {key: models.get(key, "") for key in sorted(keys)}
        for key in dict.fromkeys((*was, *self._held)):
            endpoint = self.by_key.get(key)
            if endpoint is not None and endpoint.held_for != self._held.get(key):
                endpoint.held_for = self._held.get(key)
                self.settle(endpoint)
                self.note_change(endpoint)

    # -- lookup

    def queue_of(self, target: str) -> str | None:
        """Return the queue of a target: a route, a pool, or a model's pool; None: the name is unknown."""
        if target.startswith(ROUTE_PREFIX):
            return target if self._routes.of(target) is not None else None
        if self._pool_called(target) is not None:
            return target
        endpoint = self._by_model.get(target)
        return None if endpoint is None else endpoint.candidate.pool

    def queues_of(self, candidate: Candidate) -> dict[str, None]:
        """Return the queues that a candidate serves."""
        pool, model = candidate.pool, candidate.model
        if not self._routes.queues:
            return {pool: None}
        names = (pool,) if model == pool or self._pool_called(model) is not None else (pool, model)
        return dict.fromkeys((pool, *self._routes.queues_with(candidate, names)))

    def queues(self) -> Collection[str]:
        """Return the names of all routes, and of all pools with a member."""
        return [*(name for name, pool in self.pools.items() if pool.endpoints), *self._routes.queues]

    def members(self, queue: str) -> Sequence[Candidate]:
        """Return each candidate of a queue once; for a route in the order of its steps."""
        endpoints = (endpoint for step in self.steps(queue) for endpoint in step.endpoints())
        return [endpoint.candidate for endpoint in {endpoint.key: endpoint for endpoint in endpoints}.values()]

    def candidate(self, model: str) -> Candidate | None:
        """Return the candidate of a model; None: it is not in the mesh."""
        endpoint = self._by_model.get(model)
        return None if endpoint is None else endpoint.candidate

    def engine_of(self, candidate: Candidate) -> Candidate:
        """Return the model whose engine serves a candidate: for an adapter its base model, if that is in the mesh."""
        if not candidate.base_model:
            return candidate
        base = self._by_model.get(candidate.base_model)
        return candidate if base is None or base.key != candidate.engine_key else base.candidate

    def sharing(self, candidate: Candidate) -> Sequence[Candidate]:
        """Return all candidates that share an engine with this one, itself included; empty: it left the mesh."""
        engine = self._engines.get(candidate.engine_key)
        return () if engine is None else [endpoint.candidate for endpoint in engine.endpoints.values()]

    def runner(self, key: RunnerKey) -> RunnerLoad | None:
        """Return the load of a runner incarnation; None: it has no candidate and no request."""
        return self._runners.get(key)

    def steps(self, queue: str) -> Sequence[RouteStep]:
        """Return the steps of a queue, best first: one for a pool; empty if there is no such queue."""
        steps = self._pool_steps.get(queue)
        if steps is not None:
            return steps
        resolved = self._routes.of(queue)
        return () if resolved is None else list(resolved.steps(self._pool_called, self._by_model.get))

    def resolved(self, queue: str) -> ResolvedRoute | None:
        """Return the route of a queue; None: the queue is a pool's."""
        return None if queue in self.pools else self._routes.of(queue)

    # -- changes of load and health

    def settle(self, endpoint: Endpoint) -> None:
        """Reorder an endpoint whose load or health changed."""
        if endpoint.group is not None and endpoint.group.put(endpoint):
            self.freed |= self.queues_of(endpoint.candidate)

    def settle_engine(self, endpoint: Endpoint) -> None:
        """Reorder an endpoint whose load changed, and those that share its engine."""
        self.settle(endpoint)
        if len(endpoint.engine_slots.endpoints) > 1:
            self._settle_others(endpoint)

    def _settle_others(self, endpoint: Endpoint) -> None:
        for each in endpoint.engine_slots.endpoints.values():
            if each is not endpoint:
                self.settle(each)

    def settle_runner(self, runner: RunnerLoad) -> None:
        """Reorder the endpoints of a runner that reached its request limit or left it."""
        for endpoint in runner.endpoints.values():
            self.settle(endpoint)

    def note_change(self, endpoint: Endpoint) -> None:
        """Mark the queues of a changed endpoint: it may be free, or its pool may need ejected members."""
        if endpoint.is_open or endpoint.is_spare or endpoint.pool.has_spare:
            self.freed |= self.queues_of(endpoint.candidate)

    def note_cap_released(self, pool: Pool) -> None:
        """Mark the queues of a pool that left its concurrency cap."""
        self.freed |= dict.fromkeys((pool.name, *self._routes.queues))

    def take_freed(self) -> Collection[str]:
        """Return the queues with an endpoint that may have become free since the last call."""
        freed, self.freed = self.freed, {}
        return freed

    def forget_if_unused(self, endpoint: Endpoint) -> None:
        """Remove an endpoint that left the mesh if no request runs on it."""
        if endpoint.in_flight or endpoint.group is not None:
            return
        del self.by_key[endpoint.key]
        if not endpoint.runner.requests and not endpoint.runner.endpoints:
            del self._runners[endpoint.runner.key]
        self._forget_engine_if_unused(endpoint.engine_slots)
        self._forget_pool_if_unused(endpoint.pool)

    def _pool_called(self, name: str) -> Pool | None:
        pool = self.pools.get(name)
        return pool if pool is not None and pool.endpoints else None

    def _add(self, candidate: Candidate) -> None:
        """Add an endpoint for a candidate, or reuse one on which requests of an earlier membership still run."""
        pool = self.pools.get(candidate.pool)
        if pool is None:
            settings = self._settings.pool(candidate.pool)
            pool = self.pools[candidate.pool] = Pool(candidate.pool, settings, rank_for(settings.policy))
            self._pool_steps[pool.name] = (RouteStep(PRIMARY, pool, None, takes_remote=True),)
        endpoint = self.by_key.get(candidate.key)
        engine = self._engines.setdefault(candidate.engine_key, EngineSlots(candidate.engine_key))
        if endpoint is None:
            runner = self._runners.setdefault(candidate.key[1:], RunnerLoad(candidate.key[1:]))
            health = EndpointHealth(self._limits)
            endpoint = self.by_key[candidate.key] = Endpoint(candidate, pool, engine, runner, health)
        if endpoint.engine_slots is not engine:
            endpoint.engine_slots.requests -= endpoint.in_flight
            endpoint.engine_slots.owed_tokens -= endpoint.owed_tokens
            engine.requests += endpoint.in_flight
            engine.owed_tokens += endpoint.owed_tokens
            self._forget_engine_if_unused(endpoint.engine_slots)
            endpoint.engine_slots = engine
        if endpoint.pool is not pool:
            endpoint.pool.in_flight -= endpoint.in_flight
            pool.in_flight += endpoint.in_flight
            endpoint.pool.prefilling -= endpoint.owed_tokens > 0
            pool.prefilling += endpoint.owed_tokens > 0
            self._forget_pool_if_unused(endpoint.pool)
            endpoint.pool = pool
        endpoint.candidate = candidate
        endpoint.held_for = self._held.get(candidate.key)
        endpoint.runner.endpoints[endpoint.key] = engine.endpoints[endpoint.key] = endpoint
        endpoint.runner.change_limit(0, candidate.runner_max_requests)
        self._by_model[candidate.model] = endpoint
        engine.note_used(candidate.slots_reported_used)
        pool.add(endpoint)
        self.settle_engine(endpoint)
        self.note_change(endpoint)

    def _forget_pool_if_unused(self, pool: Pool) -> None:
        if not pool.endpoints and not pool.in_flight:
            del self.pools[pool.name], self._pool_steps[pool.name]

    def _forget_engine_if_unused(self, engine: EngineSlots) -> None:
        if not engine.endpoints and not engine.requests:
            self._engines.pop(engine.key, None)


def _place_of(candidate: Candidate) -> tuple[object, ...]:
    """Return the identity of an endpoint: if it changes, another endpoint replaces it."""
    return candidate.key, candidate.pool, candidate.base_model
